"""Owners of producers, and the expiry of producers without a name.

A producer belongs to the identity that opened it first; only its owner can use or fence it.
All anonymous callers share one identity and therefore their producers. A caller in doubt owns
none. The owner is a record next to the producer. Streams check it with every batch, so it is
cached until the producer is closed.

A producer without a name is known to its client alone, which may crash before it closes it.
Such producers expire a week after their last use. The time of the last use is a record,
written when the producer is opened and again when it is used a day later, so it is at most a
day old. Opening a producer scans some of these records, at most once per SCAN_INTERVAL_S,
because their number grows in no other way.

Records hold wall-clock time because they outlive the process. A use in this process is also
judged by the monotonic clock, so a jump of the wall clock expires no active producer.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Final

from polybus.bus.dialect_registry import installed_dialects
from polybus.errors import Conflict, Damaged, Denied, MalformedRequest, UnknownProducer
from polybus.model.commit import Commit, RecordChange
from polybus.model.stamp import MAX_KEPT_RESULTS, MAX_PRODUCER_BYTES, ProducerOptions
from polybus.native.port import query_runs
from polybus.native.protocol.requests import ProducerClose, ProducerOpen

if TYPE_CHECKING:
    from polybus.bus.shares import ShareTable
    from polybus.model.identity import Identity
    from polybus.native.port.actions import Handlers
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.protocol.answers import Empty, ProducerOpened
    from polybus.store.contract import Store

OWNER: Final = b"owner/"  # + producer name → name of the owner
LAST_USE: Final = b"seen/"  # + producer name → nanoseconds since 1970
ANONYMOUS_PREFIX: Final = "anonymous-"
ANONYMOUS: Final = re.compile(r"anonymous-[0-9a-f]{32}")
DAY_S: Final = 86_400
NS: Final = 1_000_000_000
EXPIRY_S: Final = 8 * DAY_S  # age of the record: the last use was at least a week ago
SCAN_INTERVAL_S: Final = 60
SCAN_LIMIT: Final = 1000  # records per scan, which takes some milliseconds
MAX_REMEMBERED: Final = 65_536  # producers per cache, about 200 bytes each


class ProducerRegistry:
    """Owners of producers. Thread-safe."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        shares: ShareTable,
    ) -> None:
        """`shares` counts the producers by their owners."""
        self._store = store
        self._shares = shares
        self._is_counted = False  # the stored producers are in `shares`
        self._anonymous = AnonymousProducers(store, clock, wall_ns)
        self._known: dict[str, bytes] = {}
        self._closed = 0  # number of producers that were released
        self._lock = Lock()
        self._counting = Lock()

    def check(self, caller: Identity, producer: str) -> None:
        """Raise `Denied` if the producer has another owner, `UnknownProducer` if it has none."""
        owner = self._known.get(producer) or self._look_up(producer)
        if owner != caller.name.encode():
            text = f"producer {producer!r} belongs to {owner.decode()}, not to {caller.name}"
            raise Denied(text)
        if producer.startswith(ANONYMOUS_PREFIX):
            self._anonymous.record_use(producer)

    def claim(self, caller: Identity, producer: str) -> None:
        """Make the caller the owner.

        Raises:
            Denied: the producer has another owner.
            LimitReached: the caller has its share of `max_producers`.
        """
        if caller.is_in_doubt:
            raise Denied(f"producer {producer!r} needs an owner: the caller's user is not known")
        key = owner_key(producer)
        if self._store.get(key) is not None:
            self.check(caller, producer)
            return
        self._count_stored()
        self._shares.take(caller)
        change = RecordChange(key, caller.name.encode(), expected=0)
        try:
            changes = (change, *self._anonymous.use_change(producer))
            self._store.commit(Commit(changes=changes)).result()
        except BaseException as error:
            self._shares.release(caller.account_name)
            if not isinstance(error, Conflict):
                raise
            self.check(caller, producer)  # another call has claimed it meanwhile

    def release(self, producer: str) -> None:
        """Delete the records of a producer that was closed."""
        self._count_stored()
        key = owner_key(producer)
        try:
            record = self._store.get(key)
            if record is not None:
                # Of this version: two calls that close the producer must release it once.
                change = RecordChange(key, None, expected=record.version)
                changes = (change, *self._anonymous.delete_change(producer))
                self._store.commit(Commit(changes=changes)).result()
                self._shares.release(record.value.decode())
        except Conflict:
            pass  # another call has released it
        finally:
            with self._lock:
                self._closed += 1
                self._known.pop(producer, None)

    def close_expired(self) -> None:
        """Close some anonymous producers that have expired.

        Opening a producer fences a client that comes back at this moment. The records are
        deleted last, so a crash in between repeats the whole step.
        """
        for producer in self._anonymous.list_expired():
            # One whose record is damaged stays: it must not keep others from being opened.
            with suppress(Damaged):
                opened = self._store.open_producer(producer, ProducerOptions())
                self._store.close_producer(producer, opened.epoch)
                self.release(producer)

    def _count_stored(self) -> None:
        """Count the producers of the store, once, before the first change."""
        with self._counting:
            if self._is_counted:
                return
            owners: Counter[str] = Counter()
            after = b""
            while page := self._store.scan(OWNER, after):
                owners.update(record.value.decode("utf-8", "replace") for record in page)
                after = page[-1].key
            for owner, producers in owners.items():
                self._shares.restore(owner, producers)
            self._is_counted = True

    def _look_up(self, producer: str) -> bytes:
        closed = self._closed
        record = self._store.get(owner_key(producer))
        if record is None:
            raise UnknownProducer(f"producer {producer!r} is not open; open it first")
        with self._lock:
            # A release since the read may have been of this producer: do not cache it then.
            if closed == self._closed:
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                self._known[producer] = record.value
        return record.value


class AnonymousProducers:
    """Times of last use of producers without a name. Thread-safe."""

    def __init__(
        self, store: Store, clock: Callable[[], float], wall_ns: Callable[[], int]
    ) -> None:
        self._store = store
        self._clock = clock
        self._wall_ns = wall_ns
        self._recorded_s: dict[str, float] = {}  # monotonic time of the last record
        self._scanned_s: float | None = None
        self._after = b""
        self._lock = Lock()

    def use_change(self, producer: str) -> tuple[RecordChange, ...]:
        """Return the change that records a use now, for the commit that claims the producer."""
        if not ANONYMOUS.fullmatch(producer):
            return ()
        if len(self._recorded_s) >= MAX_REMEMBERED:
            self._recorded_s.clear()
        self._recorded_s[producer] = self._clock()
        return (RecordChange(LAST_USE + producer.encode(), b"%d" % self._wall_ns()),)

    def record_use(self, producer: str) -> None:
        """Record a use if the last record is a day old. Does not wait for the commit."""
        recorded_s = self._recorded_s.get(producer)
        if recorded_s is not None and self._clock() - recorded_s < DAY_S:
            return
        if changes := self.use_change(producer):
            self._store.commit(Commit(changes=changes))

    def delete_change(self, producer: str) -> tuple[RecordChange, ...]:
        """Return the change for the commit that releases the producer."""
        self._recorded_s.pop(producer, None)
        if not ANONYMOUS.fullmatch(producer):
            return ()
        return (RecordChange(LAST_USE + producer.encode(), None),)

    def list_expired(self) -> list[str]:
        """Return expired producers of the next SCAN_LIMIT records, if a scan is due."""
        with self._lock:
            now_s = self._clock()
            if self._scanned_s is not None and now_s - self._scanned_s < SCAN_INTERVAL_S:
                return []
            self._scanned_s = now_s
            records = self._store.scan(LAST_USE, self._after, SCAN_LIMIT)
            self._after = records[-1].key if len(records) == SCAN_LIMIT else b""
        expired = []
        for record in records:
            producer = record.key[len(LAST_USE) :].decode("utf-8", "replace")
            # A damaged record expires nothing: its producer stays until it is closed.
            if not record.value.isdigit() or not ANONYMOUS.fullmatch(producer):
                continue
            recorded_s = self._recorded_s.get(producer)
            if recorded_s is not None and self._clock() - recorded_s < EXPIRY_S:
                continue  # the wall clock may have jumped
            if self._wall_ns() - int(record.value) > EXPIRY_S * NS:
                expired.append(producer)
        return expired


def owner_key(producer: str) -> bytes:
    """Return the key of the owner's record; raise `MalformedRequest` if the name is invalid."""
    try:
        raw = producer.encode()
    except UnicodeEncodeError:
        raise MalformedRequest("producer must be valid Unicode text") from None
    if not 1 <= len(raw) <= MAX_PRODUCER_BYTES:
        text = f"producer must have 1 to {MAX_PRODUCER_BYTES} bytes, got {len(raw)}"
        raise MalformedRequest(text)
    return OWNER + raw


def _open(port: NativePort, caller: Caller, request: ProducerOpen) -> ProducerOpened:
    name = request.producer or ANONYMOUS_PREFIX + secrets.token_hex(16)
    if name.startswith(query_runs.PREFIX):
        raise MalformedRequest(f"producer names {query_runs.PREFIX}… are reserved: stage.publish")
    if (reserved := installed_dialects().producer_owner(name)) is not None:
        prefix, owner = reserved
        raise MalformedRequest(f"producer names {prefix}… are reserved: {owner}")
    if not 1 <= request.kept_results <= MAX_KEPT_RESULTS:
        text = f"kept_results must be from 1 to {MAX_KEPT_RESULTS}, got {request.kept_results}"
        raise MalformedRequest(text)
    port.owners.close_expired()
    port.owners.claim(caller.identity, name)
    options = ProducerOptions(request.dense, request.kept_results)
    opened = port.store.open_producer(name, options)
    return {"producer": name, "epoch": opened.epoch, "last_counter": opened.last_counter}


def _close(port: NativePort, caller: Caller, request: ProducerClose) -> Empty:
    port.owners.check(caller.identity, request.producer)
    port.store.close_producer(request.producer, request.epoch)
    port.owners.release(request.producer)
    return {}


ACTIONS: Handlers = {ProducerOpen: _open, ProducerClose: _close}
