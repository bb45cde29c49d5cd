"""One bus a URL and process: whoever opens it shares it, whoever closes it last ends it.

    memory:         the one without a name
    memory:NAME     the one of this name
    lmdb:PATH       that of the folder, however its path is written; of the data folder of
                    a bus, the store in it

After a fork the child has none of them: what it inherited says whose it is, and opening
`lmdb:PATH` there is `DataFolderInUse`, which names the owner, as in any other process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from polybus.errors import AddressError, DataFolderInUse
from polybus.native.inprocess.inprocess_bus import InProcessBus
from polybus.native.inprocess.inprocess_client import InProcessClient

LMDB, MEMORY = "lmdb:", "memory:"
IN_DATA = "store"  # what a bus calls its store within its data folder
MARK = "CURRENT"  # the file that every store of LMDB has


@dataclass(slots=True)
class _SharedBus:
    core: InProcessBus
    users: int = 0


_guard = threading.Lock()
_shared: dict[str, _SharedBus] = {}


def open_bus(url: str) -> InProcessClient:
    """A handle on the bus of this URL, which is opened if nobody here has it open."""
    place = _normalise_url(url)
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


def _normalise_url(url: str) -> str:
    """The same for all ways to write one place."""
    if url.startswith(MEMORY):
        return url
    path = url.removeprefix(LMDB)
    if path == url or not path:
        raise AddressError(f"{url!r} is no bus inside the process: write lmdb:PATH or memory:")
    folder = Path(path).resolve()
    if not (folder / MARK).exists() and (folder / IN_DATA / MARK).exists():
        folder /= IN_DATA
    return f"{LMDB}{folder}"


def _after_fork() -> None:
    """The parent's are not ours, nor is a lock that one of its threads may have held."""
    global _guard
    _guard = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)
