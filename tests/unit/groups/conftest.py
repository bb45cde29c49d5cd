from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.store.engine_registry import open_store
from tests.unit.groups.group_fixture import Desk


@pytest.fixture
def desk() -> Iterator[Desk]:
    with open_store("memory:") as store:
        yield Desk(store)
