"""The engine of `memory:` and `memory:NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.errors import UsageError
from polybus.store.engine import StoreEngine

if TYPE_CHECKING:
    from polybus.store.contract import Store
    from polybus.store.engine import StoreOptions


class MemoryEngine(StoreEngine):
    """Opens a private store, or with a name one that all callers in the process share."""

    def open(self, place: str, options: StoreOptions) -> Store:
        from polybus.store.memory.memory_store import MemoryStore, open_named

        if options.read_only:
            raise UsageError("a memory store must be opened for writing: no other process has it")
        return open_named(place) if place else MemoryStore(wall_ns=options.wall_ns)
