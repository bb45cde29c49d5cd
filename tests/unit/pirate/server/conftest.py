"""A bus of subscribers for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.pirate.server.memory_subscribers import MemorySubscribers


@pytest.fixture
def world() -> Iterator[MemorySubscribers]:
    one = MemorySubscribers()
    yield one
    one.store.close()
