"""Those who want to hear what has become visible: told by the writer, or by looking.

A reader in another process cannot be told; it looks at the number of the last
transaction a few times a second, and only if that has changed at the shards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from polybus.errors import PolybusError
from polybus.store.contract import Listener, ShardEnd
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.writer_state import scan_prefix

POLL_S: Final = 0.02
_SHARD_KEY_BYTES: Final = 9

_log = logging.getLogger("polybus.store")


class CommitListeners:
    def __init__(self) -> None:
        self._listeners: dict[object, Listener] = {}

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: Listener) -> Callable[[], None]:
        token = object()
        self._listeners[token] = listener
        return lambda: (self._listeners.pop(token, None), None)[1]

    def notify(self, news: Sequence[ShardEnd]) -> None:
        for listener in list(self._listeners.values()):
            try:
                listener(news)
            except BaseException:  # this thread is everybody's
                _log.exception("a listener of the store failed")

    def clear(self) -> None:
        self._listeners.clear()


class CommitPoller:
    """Tells listeners what another process has written."""

    def __init__(self, files: StoreFiles, listeners: CommitListeners) -> None:
        self._files = files
        self._listeners = listeners
        self._over = threading.Event()
        self._ends = self._read_ends()
        self._thread = threading.Thread(target=self._run, name="polybus-poller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        last = -1
        while not self._over.wait(POLL_S):
            try:
                last = self._poll(last)
            except PolybusError:
                _log.exception("looking for news failed, and will be tried again")

    def _poll(self, last: int) -> int:
        with self._files.snapshot() as transaction:
            number: int = transaction.id()
        if number != last:
            ends = self._read_ends()
            news = [
                ShardEnd(*target, end)
                for target, end in ends.items()
                if end > self._ends.get(target, 0)
            ]
            self._ends = ends
            if news:
                self._listeners.notify(news)
        return number

    def _read_ends(self) -> dict[tuple[int, int], int]:
        with self._files.snapshot() as transaction:
            return {
                store_keys.shard_of_state(key): stored_values.SHARD_STATE.unpack(raw)[1]
                for key, raw in scan_prefix(transaction, store_keys.STATE)
                if len(key) == _SHARD_KEY_BYTES
            }
