"""Producers without a name are forgotten when nobody has used them for a week.

Whoever opened one and died will never close it: its name was known to nobody else. When
each was last seen is a record, written when it is opened and again when it is used a day
later, so that it is at most a day behind. Some records are looked at whenever another
one is opened, at most once a minute: they become more in no other way.

Days are the wall clock's in the records, since they outlive the bus. What was used while
this bus runs is judged by its own clock as well: nobody is forgotten because the wall
clock was put forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Final

from polybus.model.commit import Commit, RecordChange

if TYPE_CHECKING:
    from polybus.model.commit import StoredRecord
    from polybus.store.contract import Store

LAST_USE: Final = b"seen/"  # + the producer's name: when, nanoseconds since 1970
ANONYMOUS: Final = re.compile(r"anonymous-[0-9a-f]{32}")
DAY_S: Final = 86_400
NS: Final = 1_000_000_000
EXPIRY_S: Final = 8 * DAY_S  # of its record: so it was used for the last time a week ago, or longer
SCAN_INTERVAL_S: Final = 60
SCAN_LIMIT: Final = 1000  # records at once: some milliseconds
MAX_REMEMBERED: Final = 65_536  # producers; some 200 bytes each


class AnonymousProducers:
    """For all threads."""

    def __init__(
        self, store: Store, clock: Callable[[], float], wall_ns: Callable[[], int]
    ) -> None:
        self._store = store
        self._clock = clock
        self._wall_ns = wall_ns
        self._recorded_s: dict[str, float] = {}  # when its record was written last, by the clock
        self._scanned_s: float | None = None
        self._after = b""
        self._lock = Lock()

    def use_change(self, producer: str) -> tuple[RecordChange, ...]:
        """Seen now: for the commit that makes it somebody's."""
        if not ANONYMOUS.fullmatch(producer):
            return ()
        self._remember(producer)
        return (RecordChange(LAST_USE + producer.encode(), b"%d" % self._wall_ns()),)

    def record_use(self, producer: str) -> None:
        """It was used. Nobody waits for the record."""
        noted_s = self._recorded_s.get(producer)
        if noted_s is not None and self._clock() - noted_s < DAY_S:
            return
        if changes := self.use_change(producer):
            self._store.commit(Commit(changes=changes))

    def delete_change(self, producer: str) -> tuple[RecordChange, ...]:
        """It is gone: for the commit that makes it nobody's."""
        self._recorded_s.pop(producer, None)
        return (
            (RecordChange(LAST_USE + producer.encode(), None),)
            if ANONYMOUS.fullmatch(producer)
            else ()
        )

    def list_expired(self) -> list[str]:
        """Some that nobody has used for so long, if it is time to look."""
        with self._lock:
            now_s = self._clock()
            if self._scanned_s is not None and now_s - self._scanned_s < SCAN_INTERVAL_S:
                return []
            self._scanned_s = now_s
            records = self._store.scan(LAST_USE, self._after, SCAN_LIMIT)
            self._after = records[-1].key if len(records) == SCAN_LIMIT else b""
        return [_name(one) for one in records if self._is_old(one)]

    def _is_old(self, record: StoredRecord) -> bool:
        noted_s = self._recorded_s.get(_name(record))
        if noted_s is not None and self._clock() - noted_s < EXPIRY_S:
            return False
        return self._wall_ns() - int(record.value) > EXPIRY_S * NS

    def _remember(self, producer: str) -> None:
        if len(self._recorded_s) >= MAX_REMEMBERED:
            self._recorded_s.clear()
        self._recorded_s[producer] = self._clock()


def _name(record: StoredRecord) -> str:
    return record.key[len(LAST_USE) :].decode()
