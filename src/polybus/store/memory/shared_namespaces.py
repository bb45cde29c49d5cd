"""Stores in memory that have a name: all who open one in this process share it."""

from __future__ import annotations

import threading
import time
from weakref import WeakValueDictionary

from polybus.errors import StoreClosed
from polybus.store.memory.memory_store import MemoryStore, SharedNamespace

_spaces: WeakValueDictionary[str, SharedNamespace] = WeakValueDictionary()
_lock = threading.Lock()


def open_named(name: str) -> MemoryStore:
    """The store of this name, which goes with the last who closes it; a new one if none is."""
    with _lock:
        space = _spaces.get(name)
        try:
            return MemoryStore(space=space or _new(name))
        except StoreClosed:
            return MemoryStore(space=_new(name))


def _new(name: str) -> SharedNamespace:
    space = _spaces[name] = SharedNamespace(time.time_ns, time.monotonic)
    return space
