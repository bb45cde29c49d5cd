"""One rqueue connection on the bus: frames in, bus calls out.

The compiled fan-out routes PUBLISH frames and stops at every other frame, so Python runs
once per received buffer and once per SUBSCRIBE, REMOVE or DEREGISTER. The protocol has no
error frame: a client that sends an invalid frame, or reaches a limit, is disconnected, and
the log has the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polybus.bus.subscriptions import SubscribeResult
from polybus.dialects.rqueue import codec
from polybus.dialects.rqueue.client.notification_batch import Part
from polybus.dialects.rqueue.parts import PartLimits, Reassembler
from polybus.dialects.rqueue.server.rqueue_framing import REASONS, RqueueEncoding, RqueueFraming
from polybus.kernel.fanout import BAD_FRAME, CONTROL_FRAME, FRAGMENTS_FIRST, PlainRoute

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.connection import Connection, ConnectionIO
    from polybus.dialects.rqueue.limits import RqueueLimits

LIMITS_REACHED = (
    SubscribeResult.TOO_MANY_SUBSCRIPTIONS,
    SubscribeResult.TOO_MANY_TOPICS,
    SubscribeResult.TOO_MANY_USER_TOPICS,
)


class RqueueServer:
    """State shared by all rqueue connections of a bus; a call with a pipe opens a session."""

    def __init__(self, broker: Broker, limits: RqueueLimits) -> None:
        self.broker = broker
        self.encoding = RqueueEncoding(broker.new_encoding_number(), limits.max_payload)
        self.framing = RqueueFraming(self.encoding)
        self.assembly = PartAssembler(broker, limits)

    def __call__(self, pipe: ConnectionIO) -> RqueueSession:
        return RqueueSession(self, pipe)


class RqueueSession:
    def __init__(self, dialect: RqueueServer, pipe: ConnectionIO) -> None:
        self._broker = dialect.broker
        self._framing = dialect.framing
        self._route = dialect.broker.route
        self._assembly = dialect.assembly
        self._connection = dialect.broker.join("rqueue", pipe, dialect.encoding)
        route = PlainRoute(dialect.broker.fanout, self._connection.source, dialect.framing)
        pipe.use_plain_route(route)
        # The transport calls the outbox directly.
        self.on_stalled = self._connection.outbox.on_stalled
        self.on_writable = self._connection.outbox.on_writable

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        """Execute the whole frames in buffer[start:end]. Returns the bytes consumed."""
        at = start
        while True:
            routed = self._route(self._connection, self._framing, buffer, at, end)
            at += routed.consumed
            if routed.fragments:
                self._assembly.add(self._connection, routed.fragments)
            # Delivery and assembly may close the connection; then nothing more is executed.
            if routed.stop == FRAGMENTS_FIRST and not self._connection.is_closed:
                continue
            if routed.stop == CONTROL_FRAME and not self._connection.is_closed:
                if routed.code == codec.SUBSCRIBE:
                    result = self._broker.subscribe(self._connection, routed.topic)
                    # The protocol has no error frame: a limit ends the connection.
                    if result in LIMITS_REACHED:
                        self._broker.close(self._connection, result.value)
                elif routed.code == codec.REMOVE:
                    self._broker.unsubscribe(self._connection, routed.topic)
                else:
                    self._broker.unsubscribe_all(self._connection)
                if not self._connection.is_closed:
                    continue
            if routed.stop == BAD_FRAME:
                self._broker.close(self._connection, REASONS[routed.code])
            return at - start

    def on_half_closed(self) -> bool:
        """Close: without acknowledgements, a half-closed peer looks like one that is gone."""
        self._broker.finish(self._connection)
        return False

    def on_ended(self) -> None:
        self._assembly.discard(self._connection)
        self._broker.leave(self._connection)


PART_HEADER = struct.Struct(">16sHH")  # message id, index, count


class PartAssembler:
    """Reassembles PARTs for readers of other dialects, with one Reassembler per publisher.

    rqueue's own readers get the PARTs as they are and reassemble them. Other readers need
    whole messages, so the server reassembles those of topics that such a reader reads.
    """

    def __init__(self, broker: Broker, limits: RqueueLimits) -> None:
        self._broker = broker
        self._limits = PartLimits(
            max_message_bytes=limits.max_message_bytes, timeout_s=limits.part_timeout_s
        )
        self._in_progress: dict[Connection, Reassembler] = {}
        broker.on_tick.append(self.expire)

    def add(self, connection: Connection, fragments: Sequence[tuple[bytes, bytes]]) -> None:
        parts = self._in_progress.setdefault(connection, Reassembler(self._limits))
        before = parts.lost_messages
        for topic, body in fragments:
            message_id, index, count = PART_HEADER.unpack_from(body)
            part = Part(topic, message_id, index, count, body[PART_HEADER.size :])
            whole = parts.add(part, self._broker.now_s())
            if whole is not None:
                self._broker.publish_assembled(connection, topic, whole)
        self._count(parts.lost_messages - before)

    def expire(self, now_s: float) -> None:
        for connection, parts in list(self._in_progress.items()):
            self._count(parts.expire(now_s))
            if not len(parts):
                del self._in_progress[connection]

    def discard(self, connection: Connection) -> None:
        parts = self._in_progress.pop(connection, None)
        if parts is not None:
            self._count(len(parts))

    def _count(self, lost: int) -> None:
        self._broker.counters.count("dropped", "incomplete_parts", lost)
