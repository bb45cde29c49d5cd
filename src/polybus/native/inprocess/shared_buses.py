"""One bus per store URL and process: the first `open_bus` opens it, the last `close` ends it.

URLs that name the same store share a bus (`engine_registry.canonical_url`). The data folder
of a bus stands for the store in it.

A child of a fork shares none of them. A handle it inherited raises an error that names the
owner, and opening the same folder there raises `DataFolderInUse` as in any other process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from polybus.errors import DataFolderInUse
from polybus.native.inprocess.inprocess_bus import InProcessBus
from polybus.native.inprocess.inprocess_client import InProcessClient
from polybus.store.engine_registry import canonical_url


@dataclass(slots=True)
class _SharedBus:
    core: InProcessBus
    users: int = 0


_guard = threading.Lock()
_shared: dict[str, _SharedBus] = {}


def open_bus(url: str) -> InProcessClient:
    """A handle on the bus of this URL, which is opened if nobody here has it open."""
    place = canonical_url(url)
    with _guard:
        shared = _shared.get(place)
        if shared is None:
            shared = _shared[place] = _SharedBus(_open(place))
        shared.users += 1
        return InProcessClient(shared.core, lambda: _release_bus(place, shared))


def _open(place: str) -> InProcessBus:
    try:
        return InProcessBus(place)
    except DataFolderInUse as error:
        text = f"{error}: run `polybus serve` there, and use polybus://HOST:PORT"
        raise DataFolderInUse(text) from None


def _release_bus(place: str, shared: _SharedBus) -> None:
    """Under the lock to its end: whoever opens it again finds the folder free."""
    with _guard:
        shared.users -= 1
        if not shared.users:
            del _shared[place]
            shared.core.close()


def _after_fork() -> None:
    """The parent's are not ours, nor is a lock that one of its threads may have held."""
    global _guard
    _guard = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)
