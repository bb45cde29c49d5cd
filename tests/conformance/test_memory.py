"""The memory engine passes the conformance suite."""

from __future__ import annotations

import pytest

from polybus.store.memory.memory_store import MemoryStore
from polybus.testing.conformance import Check, Engine, checks, name_of

MEMORY = Engine(lambda wall_ns: MemoryStore(wall_ns=wall_ns))


@pytest.mark.parametrize("check", checks(MEMORY), ids=name_of)
def test_memory(check: Check) -> None:
    check(MEMORY)
