"""Listeners of a store, called by the writer or by a poller.

A reader in another process gets no call from the writer. It polls the number of the last
transaction many times per second, and reads the ends of the shards only if that changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from polybus.errors import PolybusError
from polybus.store.contract import Listener, ShardEnd
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.write_batch import Target
from polybus.store.lmdb.writer_state import scan_prefix

POLL_S: Final = 0.02
_SHARD_KEY_BYTES: Final = 9

_log = logging.getLogger("polybus.store")


class CommitListeners:
    """The listeners of one store, called after each group of commits."""

    def __init__(self) -> None:
        self._listeners: dict[object, Listener] = {}

    def add(self, listener: Listener) -> Callable[[], None]:
        token = object()
        self._listeners[token] = listener
        return lambda: (self._listeners.pop(token, None), None)[1]

    def notify(self, ends: Mapping[Target, int]) -> None:
        """Report the new ends of shards to all listeners."""
        if not (ends and self._listeners):
            return
        news = [ShardEnd(*target, end) for target, end in ends.items()]
        # A copy: a listener may remove itself while it is called.
        for listener in list(self._listeners.values()):
            try:
                listener(news)
            except BaseException:  # the calling thread serves all listeners
                _log.exception("a listener of the store failed")

    def clear(self) -> None:
        self._listeners.clear()


class CommitPoller:
    """Polls for commits of another process and calls the listeners."""

    def __init__(self, files: StoreFiles, listeners: CommitListeners) -> None:
        self._files = files
        self._listeners = listeners
        self._over = threading.Event()
        self._ends = self._read_ends()
        self._thread = threading.Thread(target=self._run, name="polybus-poller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        # A listener may close the store, on the poller's own thread.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        # The first poll always compares: a commit may have come after the ends were read.
        last = -1
        while not self._over.wait(POLL_S):
            try:
                with self._files.snapshot() as transaction:
                    number = transaction.id()
                if number != last:
                    before, self._ends = self._ends, self._read_ends()
                    self._listeners.notify(
                        {
                            target: end
                            for target, end in self._ends.items()
                            if end > before.get(target, 0)
                        }
                    )
                    last = number
            except PolybusError:
                _log.exception("polling the store failed; it will be retried")

    def _read_ends(self) -> dict[Target, int]:
        with self._files.snapshot() as transaction:
            return {
                store_keys.shard_of_state(key): stored_values.SHARD_STATE.unpack(raw)[1]
                for key, raw in scan_prefix(transaction, store_keys.STATE)
                if len(key) == _SHARD_KEY_BYTES
            }
