"""The call log: every ended call is a message of the durable topic `gsb.calls`.

A message is one JSON object, so that Spark and other readers need no schema of GSB:

    {"at_ms": …, "caller": "local:1000", "address": "greeter/many", "service": "greeter",
     "request_bytes": …, "reply_bytes": …, "replies": …, "code": 0, "duration_ms": …}

`code` is 0, 500 for a failure of the service, or the code of the bus. Ended calls are committed
in batches, a few times per second. Calls that cannot be stored are dropped and counted, because
a slow disk must not slow down calls.

The topic is reserved (bus/policy.py): no client writes it, and admins read, trim and remove it.
A topic that was removed is created again, so that an admin cannot end the log by mistake.
"""

from __future__ import annotations

import json
from array import array
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.dialects.gsb.limits import CALL_LOG_TOPIC
from polybus.dialects.gsb.service_address import MAX_LOGGED_ADDRESS_BYTES
from polybus.durable.durable_bus import durable_bus
from polybus.durable.topic_names import CREATOR, NameReservation, creator_of, creator_record
from polybus.errors import ConfigError, PolybusError
from polybus.model.block import Block

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.dialects.gsb.server.call_table import CallTable
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic

BATCH = 1024  # per commit: some milliseconds of the loop
# Collected or in flight, some 300 bytes each. More are dropped.
MAX_PENDING = 262_144
CLOSE_TIMEOUT_S = 3.0
MS_PER_S = 1000


class EndedCall(NamedTuple):
    """One record of the log. `begun_s` and `ended_s` are monotonic times of the bus."""

    caller: str
    address: str
    service: str
    request_bytes: int
    reply_bytes: int
    replies: int
    code: int
    begun_s: float
    ended_s: float


class CallLog:
    """Collects ended calls from `table.log` and refused ones from `add`."""

    def __init__(self, broker: Broker, table: CallTable, owner: Identity) -> None:
        self._broker = broker
        self._durable = durable_bus(broker)
        self._table = table
        self._owner = owner
        table.log = []
        self._pending: list[EndedCall] = []
        self._in_flight: list[tuple[Future[Any], int]] = []
        self._topic: Topic | None = None
        self._is_flush_scheduled = False
        self._open_topic()
        if self._durable is not None:
            self._durable.names.on_removed.append(self._on_topic_removed)

    def add(
        self,
        caller_name: bytes,
        address: bytes,
        request_bytes: int,
        code: int,
        service: str = "",
        reply_bytes: int = 0,
    ) -> None:
        """Log a call that was refused, or that the bus answered itself."""
        self._collect()  # keeps the order in which calls ended
        name = address[:MAX_LOGGED_ADDRESS_BYTES].decode("utf-8", "backslashreplace")
        now_s = self._broker.now_s()
        sender, replies = caller_name.decode(), 1
        self._pending.append(
            EndedCall(
                sender, name, service, request_bytes, reply_bytes, replies, code, now_s, now_s
            )
        )

    def tick(self, _now_s: float) -> None:
        self.flush()

    def close(self) -> None:
        """Commit the collected calls and wait up to CLOSE_TIMEOUT_S. Called when the bus stops."""
        self._collect()
        while self._topic is not None and self._pending:
            self.flush()
        wait([future for future, _ in self._in_flight], CLOSE_TIMEOUT_S)
        self._reap_commits()

    def flush(self) -> None:
        """Commit one batch. Later turns of the loop commit the rest, so that no turn is long."""
        self._reap_commits()
        self._collect()
        # The oldest calls are dropped if the disk is too slow: it must not slow down calls.
        waiting = len(self._pending) + sum(count for _, count in self._in_flight)
        dropped = min(waiting - MAX_PENDING, len(self._pending))
        if dropped > 0:
            del self._pending[:dropped]
            self._broker.counters.count("dropped", "audit_overflow", dropped)
        if self._topic is None or not self._pending:
            return
        self._write(self._topic, self._pending[:BATCH])
        del self._pending[:BATCH]
        if self._pending and not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._broker.turn.call_soon(self._continue_flush)

    def _continue_flush(self) -> None:
        self._is_flush_scheduled = False
        self.flush()

    def _write(self, topic: Topic, ended: list[EndedCall]) -> None:
        assert self._durable is not None
        wall_ms, now_s = self._broker.wall_ns() // 1_000_000, self._broker.now_s()
        bodies = [_row(call, wall_ms, now_s) for call in ended]
        ends = array("i", [0])
        for body in bodies:
            ends.append(ends[-1] + len(body))
        block = Block.from_columns(b"".join(bodies), ends, insertion_ms=wall_ms)
        try:
            future = self._durable.topics.produce(topic, block)
        except PolybusError as error:
            self._count_lost(len(ended), error)
            return
        self._in_flight.append((future, len(ended)))

    def _collect(self) -> None:
        log = self._table.log
        if log:
            self._table.log = []
            self._pending += [
                EndedCall(
                    call.origin.node if call.origin else call.caller.caller_name.decode(),
                    call.address.decode(),
                    call.service.id,
                    call.request_bytes,
                    call.reply_bytes,
                    call.partials + 1,
                    code,
                    call.begun_s,
                    now_s,
                )
                for call, code, now_s in log
            ]

    def _reap_commits(self) -> None:
        """Remove finished commits and count the failed ones."""
        done = [pair for pair in self._in_flight if pair[0].done()]
        if done:
            self._in_flight = [pair for pair in self._in_flight if pair not in done]
        for future, count in done:
            error = future.exception()
            if error is not None:
                self._count_lost(count, error)

    def _open_topic(self) -> None:
        """Open the topic, or create it on a worker thread.

        Raises `ConfigError` if a client created it, before the name was reserved: that user
        could remove it, and its messages may be forged.
        """
        durable = self._durable
        if durable is None:
            self._broker.log.warning("calls are not logged", reason="the bus has no store")
            return
        try:
            topic, _ = durable.names.reserve_for_bus(self._owner, CALL_LOG_TOPIC)
        except PolybusError as error:
            self._broker.log.warning("calls are not logged", reason=str(error))
            return
        if not isinstance(topic, NameReservation):
            creator = creator_of(topic)
            if not self._broker.policy.is_born_admin(creator):
                raise ConfigError(
                    f"gsb.audit: topic {CALL_LOG_TOPIC} was created by {creator.name}, not by the"
                    f" bus; start once with audit = false, run `polybus topic rm {CALL_LOG_TOPIC}`"
                    " as an admin, and start again"
                )
            self._topic = topic
            return
        settings: dict[str, object] = {CREATOR: creator_record(self._owner)}
        store = durable.topics.store

        def create() -> tuple[Topic, int]:
            created = store.create(CALL_LOG_TOPIC, 1, settings)
            return created, store.bounds(created.number).next_id

        durable.run_blocking(create, lambda done: self._on_topic_created(topic, done))

    def _on_topic_created(
        self, reservation: NameReservation, done: Future[tuple[Topic, int]]
    ) -> None:
        assert self._durable is not None
        error = done.exception()
        if isinstance(error, Exception):
            self._durable.names.abort(reservation, error)
            self._broker.log.warning("calls are not logged", reason=str(error))
            return
        self._topic, next_id = done.result()
        self._durable.names.complete(reservation, self._topic, next_id)

    def _on_topic_removed(self, removed: Topic) -> None:
        if self._topic is not None and removed.number == self._topic.number:
            self._topic = None
            self._open_topic()

    def _count_lost(self, count: int, error: BaseException) -> None:
        self._broker.counters.count("dropped", "audit_not_kept", count)
        self._broker.log.warning("calls were not logged", count=count, reason=str(error))


def _row(call: EndedCall, wall_ms: int, now_s: float) -> bytes:
    """Return the record as JSON. Only an unresolved address may need escaping."""
    at_ms = wall_ms - round((now_s - call.begun_s) * MS_PER_S)
    duration_ms = round((call.ended_s - call.begun_s) * MS_PER_S, 3)
    address = json.dumps(call.address) if not call.service else f'"{call.address}"'
    return (
        f'{{"at_ms":{at_ms},"caller":"{call.caller}","address":{address},'
        f'"service":"{call.service}","request_bytes":{call.request_bytes},'
        f'"reply_bytes":{call.reply_bytes},"replies":{call.replies},"code":{call.code:d},'
        f'"duration_ms":{duration_ms}}}'
    ).encode()
