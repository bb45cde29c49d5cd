from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.store.engine_registry import open_store
from tests.unit.groups.group_harness import GroupHarness


@pytest.fixture
def harness() -> Iterator[GroupHarness]:
    with open_store("memory:") as store:
        yield GroupHarness(store)
