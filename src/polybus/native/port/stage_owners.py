"""Open stages by the callers that opened them, so that each keeps to its share.

A stage is counted until it is published, discarded, or its lease has expired. The store's
lease begins first, so a stage is counted at least as long as the store keeps it. Stages of an
earlier run of the bus are not counted; their leases bound them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import LimitReached

if TYPE_CHECKING:
    from polybus.bus.shares import ShareTable
    from polybus.model.identity import Identity

# A search for expired leases looks at all stages: a caller without room must not repeat it.
SEARCH_INTERVAL_S: Final = 1.0


class OpenStage(NamedTuple):
    account: str
    until_s: float


class StageOwners:
    """Thread-safe."""

    def __init__(self, shares: ShareTable, clock: Callable[[], float]) -> None:
        self._shares = shares
        self._clock = clock
        self._open: dict[str, OpenStage] = {}
        self._next_search_s = 0.0
        self._lock = Lock()

    def open(self, caller: Identity, lease_s: float, open_stage: Callable[[float], str]) -> str:
        """Return the name of a new stage. Raises `LimitReached`, with no stage opened."""
        try:
            self._shares.take(caller)
        except LimitReached:
            if not self._end_expired():
                raise
            self._shares.take(caller)
        try:
            name = open_stage(lease_s)
        except BaseException:
            self._shares.release(caller.account_name)
            raise
        with self._lock:
            self._open[name] = OpenStage(caller.account_name, self._clock() + lease_s)
        return name

    def renew(self, name: str, lease_s: float) -> None:
        """Record that the store has restarted the lease."""
        with self._lock:
            stage = self._open.get(name)
            if stage is not None:
                self._open[name] = stage._replace(until_s=self._clock() + lease_s)

    def end(self, names: Iterable[str]) -> None:
        """Record that stages were published or discarded."""
        with self._lock:
            for name in names:
                stage = self._open.pop(name, None)
                if stage is not None:
                    self._shares.release(stage.account)

    def _end_expired(self) -> bool:
        """Forget stages whose leases have expired. Returns False if there were none."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_search_s:
                return False
            self._next_search_s = now_s + SEARCH_INTERVAL_S
            expired = [name for name, stage in self._open.items() if stage.until_s <= now_s]
        self.end(expired)
        return bool(expired)
