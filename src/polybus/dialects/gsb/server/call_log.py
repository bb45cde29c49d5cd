"""The log of calls: every call that has ended is a message of the durable topic `gsb.calls`.

A message is one JSON object, so that Spark and everybody else can read it:

    {"at_ms": …, "caller": "local:1000", "address": "greeter/many", "service": "greeter",
     "request_bytes": …, "reply_bytes": …, "replies": …, "code": 0, "duration_ms": …}

`code` is 0, 500 for a failure of the service's own, else what the bus said. Calls are
gathered and committed a few times a second. What cannot be kept is counted: a slow disk
must not slow down calls.
"""

from __future__ import annotations

import json
from array import array
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.dialects.gsb.service_address import MAX_TOLD_BYTES
from polybus.durable.topic_names import CREATOR, Reservation, as_creator
from polybus.errors import PolybusError
from polybus.model.block import Block

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.dialects.gsb.server.call_peer import Peer
    from polybus.dialects.gsb.server.call_table import Call, Desk
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic

TOPIC = "gsb.calls"
BATCH = 1024  # written together: some milliseconds of the loop
# Gathered or on their way to the disk, some 300 bytes each; more are dropped.
MAX_WAITING = 262_144
CLOSE_TIMEOUT_S = 3.0
MS_PER_S = 1000


class Ended(NamedTuple):
    """What is told of one call. `ended_s` and `begun_s` are of the bus's own clock."""

    caller: str
    address: str
    service: str
    request_bytes: int
    reply_bytes: int
    replies: int
    code: int
    begun_s: float
    ended_s: float

    @classmethod
    def of(cls, call: Call, code: int, now_s: float) -> Ended:
        return cls(
            call.caller.caller_name.decode(),
            call.address.decode(),
            call.service.id,
            call.request_bytes,
            call.reply_bytes,
            call.partials + 1,
            code,
            call.begun_s,
            now_s,
        )

    @classmethod
    def refused(cls, caller: Peer, address: bytes, size: int, code: int, now_s: float) -> Ended:
        name = address[:MAX_TOLD_BYTES].decode("utf-8", "backslashreplace")
        return cls(caller.caller_name.decode(), name, "", size, 0, 1, code, now_s, now_s)

    @classmethod
    def by_bus(cls, caller: Peer, name: str, size: int, found: int, now_s: float) -> Ended:
        return cls(caller.caller_name.decode(), name, name, size, found, 1, 0, now_s, now_s)


class Audit:
    """Calls that were open come by `desk.log`, from either way of calls; others by `add`."""

    def __init__(self, broker: Broker, desk: Desk, owner: Identity) -> None:
        self._broker = broker
        self._desk = desk
        self._owner = owner
        desk.log = []
        self._gathered: list[Ended] = []
        self._on_their_way: list[tuple[Future[Any], int]] = []
        self._topic: Topic | None = None
        self._flushing = False  # soon
        self._prepare()

    def add(self, ended: Ended) -> None:
        self._collect()  # they keep the order in which they ended
        self._gathered.append(ended)

    def tick(self, _now_s: float) -> None:
        self.flush()

    def close(self) -> None:
        """The bus is stopping: what was gathered is kept, if the disk lets it."""
        self._collect()
        while self._topic is not None and self._gathered:
            self.flush()
        wait([future for future, _ in self._on_their_way], CLOSE_TIMEOUT_S)
        self._settle()

    def flush(self) -> None:
        """Writes some of them; the rest in the next turns of the loop, so that none is long."""
        self._settle()
        self._collect()
        waiting = len(self._gathered) + sum(count for _, count in self._on_their_way)
        self._drop(waiting - MAX_WAITING)
        if self._topic is None or not self._gathered:
            return
        self._write(self._topic, self._gathered[:BATCH])
        del self._gathered[:BATCH]
        if self._gathered and not self._flushing:
            self._flushing = True
            self._broker.turn.call_soon(self._flush_on)

    def _flush_on(self) -> None:
        self._flushing = False
        self.flush()

    def _write(self, topic: Topic, ended: list[Ended]) -> None:
        assert self._broker.durable is not None
        try:
            future = self._broker.durable.produce(topic, self._block(ended))
        except PolybusError as error:
            self._lost(len(ended), error)
            return
        self._on_their_way.append((future, len(ended)))

    def _collect(self) -> None:
        log = self._desk.log
        if log:
            self._desk.log = []
            self._gathered += [Ended.of(call, code, now_s) for call, code, now_s in log]

    def _settle(self) -> None:
        """Forgets what has arrived."""
        done = [pair for pair in self._on_their_way if pair[0].done()]
        if done:
            self._on_their_way = [pair for pair in self._on_their_way if pair not in done]
        for future, count in done:
            error = future.exception()
            if error is not None:
                self._lost(count, error)

    def _block(self, ended: list[Ended]) -> Block:
        wall_ms, now_s = self._broker.wall_ns() // 1_000_000, self._broker.now_s()
        bodies = [_row(one, wall_ms, now_s) for one in ended]
        ends = array("i", [0])
        for body in bodies:
            ends.append(ends[-1] + len(body))
        return Block.from_columns(b"".join(bodies), ends, insertion_ms=wall_ms)

    def _prepare(self) -> None:
        """Makes the topic, if it is not there; the disk is waited for elsewhere."""
        binding, durable = self._broker.binding, self._broker.durable
        if binding is None or durable is None:
            self._broker.log.warning("calls are not logged", reason="this bus has no store")
            return
        try:
            found, _ = binding.reserve(self._owner, TOPIC)
        except PolybusError as error:
            self._broker.log.warning("calls are not logged", reason=str(error))
            return
        if not isinstance(found, Reservation):
            self._topic = found
            return
        settings: dict[str, object] = {CREATOR: as_creator(self._owner)}
        store = durable.store
        assert self._broker.readers is not None
        self._broker.readers(lambda: _made(store, settings), lambda done: self._made(found, done))

    def _made(self, reservation: Reservation, done: Future[tuple[Topic, int]]) -> None:
        assert self._broker.binding is not None
        error = done.exception()
        if isinstance(error, Exception):
            self._broker.binding.give_up(reservation, error)
            self._broker.log.warning("calls are not logged", reason=str(error))
            return
        self._topic, next_id = done.result()
        self._broker.binding.fulfil(reservation, self._topic, next_id)

    def _drop(self, count: int) -> None:
        count = min(count, len(self._gathered))
        if count > 0:
            del self._gathered[:count]
            self._broker.counters.count("dropped", "audit_overflow", count)

    def _lost(self, count: int, error: BaseException) -> None:
        self._broker.counters.count("dropped", "audit_not_kept", count)
        self._broker.log.warning("calls were not logged", count=count, reason=str(error))


def _made(store: Any, settings: dict[str, object]) -> tuple[Topic, int]:
    topic = store.create(TOPIC, 1, settings)
    return topic, store.bounds(topic.number).next_id


def _row(one: Ended, wall_ms: int, now_s: float) -> bytes:
    """As `json.dumps` writes it; only an address that leads nowhere may need escaping."""
    at_ms = wall_ms - round((now_s - one.begun_s) * MS_PER_S)
    duration_ms = round((one.ended_s - one.begun_s) * MS_PER_S, 3)
    address = json.dumps(one.address) if not one.service else f'"{one.address}"'
    return (
        f'{{"at_ms":{at_ms},"caller":"{one.caller}","address":{address},'
        f'"service":"{one.service}","request_bytes":{one.request_bytes},'
        f'"reply_bytes":{one.reply_bytes},"replies":{one.replies},"code":{one.code:d},'
        f'"duration_ms":{duration_ms}}}'
    ).encode()
