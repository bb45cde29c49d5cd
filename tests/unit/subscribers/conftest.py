"""A bus of subscribers for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.subscribers.world import World


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.store.close()
