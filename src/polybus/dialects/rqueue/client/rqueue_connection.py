"""One connection of a client to an rqueue server, from connecting to its end.

A connection writes with back-pressure (`write`, then `drain`) and passes received messages
on in batches. It is never reopened: `RqueueReconnector` makes the next one.

The protocol has no acknowledgement, but frames of one connection take effect in order. So
each connection subscribes to a private probe topic; `echo` publishes a number there and
waits for it to return. Then everything sent before is in force. Echoes are removed from the
batches. A new connection counts as up when its first echo has returned: then the peer is
known to speak rqueue, and every topic is subscribed.

Other servers may execute the frames of a connection in any order, so a number may arrive
before the probe topic is subscribed: it is sent again until it returns. If it never returns,
the connection counts as up all the same, with a warning, and nothing on it is confirmed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from polybus.clients import client_connection, reconnector
from polybus.dialects.rqueue import codec
from polybus.dialects.rqueue.client.notification_batch import (
    PAYLOAD_TOO_LARGE,
    NotificationBatch,
    scan,
)
from polybus.errors import AddressError, BadFrame, NotConnected, PolybusError
from polybus.model.address import Address
from polybus.model.limits import KIB, MIB, Limits
from polybus.model.topic_name import PROBE_PREFIX, PROBE_RANDOM_BYTES

if TYPE_CHECKING:
    from polybus.dialects.rqueue.client.client import ClientOptions

log = logging.getLogger("polybus.rqueue")

# Bytes of one read: larger gains nothing, smaller costs system calls.
READ_BUFFER_BYTES = 256 * KIB
# A publisher that never waits yields to the loop after this much: about a millisecond.
TURN_BYTES = 1 * MIB
# Bytes that a server may send before an echo: twice its largest outbox.
ECHO_SLACK_BYTES = 2 * Limits().outbox_max_bytes
NUMBER_BYTES = 8
# Pause before a number is sent again; it doubles. Our server answers the first in order.
FIRST_RESEND_S = 0.1
LAST_RESEND_S = 2.0
# Of the time for connecting: after it a server without an answer is taken as one that has none.
PROBE_TIME_SHARE = 0.5

CLOSED_BY_SERVER = (
    "the server closed the connection: it stopped, a limit was reached, this client read too"
    " slowly, or sent an invalid frame, such as one over --max-payload; see the server's log"
)
UNCONFIRMED = (
    "%s did not return a probe within %g s: it is not a polybus server, or it is overloaded;"
    " continuing, but subscribe and flush cannot wait until they are in force"
)
LARGER_CAP = "the server's --max-payload is larger than this client's max_payload; make them equal"


class RqueueConnection(client_connection.ClientConnection):
    """One connection. `on_batch` gets each batch that is not empty; `on_end` is called once."""

    closed_by_peer = CLOSED_BY_SERVER

    def __init__(
        self,
        address: Address,
        max_payload: int,
        on_batch: Callable[[NotificationBatch], None],
        on_end: Callable[[RqueueConnection], None],
        reading: bool = True,
    ) -> None:
        super().__init__(address)
        self.probe_topic = PROBE_PREFIX + os.urandom(PROBE_RANDOM_BYTES)
        self._max_payload = max_payload
        self._on_batch = on_batch
        self._on_end = on_end
        self._buffer = bytearray(max(READ_BUFFER_BYTES, 2 * (codec.HEADER.size + max_payload)))
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._bytes_since_yield = 0  # bytes written since the last yield to the loop
        self._numbers = itertools.count()
        self._echoes: dict[int, asyncio.Future[None]] = {}
        self.has_echoes = True  # False if the server did not answer; its next echo sets it again
        self._reading = True
        self._wants_reading = reading
        self._slack_bytes = ECHO_SLACK_BYTES

    # --- called by the client

    def write(self, data: bytes) -> bool:
        """Write bytes. Returns False if the connection has ended or is closing."""
        if self._transport is None or not self.is_up:
            return False
        self._transport.write(data)
        self._bytes_since_yield += len(data)
        return True

    async def drain(self) -> None:
        """Wait until more may be written. Raises ConnectionLost if the connection ends first.

        Yields to the event loop every TURN_BYTES, even if there is always room.
        """
        if not self._writable.is_set():
            await self._writable.wait()
        elif self._bytes_since_yield > TURN_BYTES:
            self._bytes_since_yield = 0
            await asyncio.sleep(0)
        if self.ended.is_set():
            raise self.make_loss_error()

    async def echo(self, timeout_s: float) -> None:
        """Wait until the server has executed everything written before.

        Returns at once if the server has no echoes. Raises NotConnected after the timeout.
        """
        number, pause_s = next(self._numbers), FIRST_RESEND_S
        probe = codec.publish(self.probe_topic, number.to_bytes(NUMBER_BYTES, "big"))
        if not self.write(probe):
            raise self.make_loss_error()
        if not self.has_echoes:
            return
        waiter = self._echoes[number] = asyncio.get_running_loop().create_future()
        self._regulate()
        try:
            async with asyncio.timeout(timeout_s):
                while not (await asyncio.wait([waiter], timeout=pause_s))[0]:
                    self.write(probe)
                    pause_s = min(2 * pause_s, LAST_RESEND_S)
                waiter.result()  # raises if the connection has ended
        except TimeoutError:
            raise NotConnected(f"no answer from {self.address} within {timeout_s:g} s") from None
        finally:
            del self._echoes[number]
            self._regulate()

    def set_reading(self, wanted: bool) -> None:
        """Read from the socket, or stop so that the server applies back-pressure.

        While an echo is awaited, the connection reads up to ECHO_SLACK_BYTES regardless:
        otherwise a caller that subscribes before it reads again would never get the echo.
        """
        self._wants_reading = wanted
        self._regulate()

    # --- called by the event loop

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if not self._wants_reading:
            self._slack_bytes -= nbytes
        end = self._filled + nbytes
        consumed, batch, bad = scan(self._buffer, 0, end, self._max_payload)
        self._filled = end - consumed
        if consumed and self._filled:
            self._view[: self._filled] = self._view[consumed:end]
        batch, echoes = batch.without(self.probe_topic)
        self.has_echoes = self.has_echoes or bool(echoes)
        for number in echoes:
            waiter = self._echoes.get(int.from_bytes(number, "big"))
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if len(batch) or batch.part_count:
            self._on_batch(batch)
        self._regulate()
        if bad is not None:
            error = BadFrame(bad)
            if bad == PAYLOAD_TOO_LARGE:
                error.add_note(LARGER_CAP)
            self.abort_with(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def on_ended(self) -> None:
        self._on_end(self)
        self._writable.set()
        for waiter in self._echoes.values():
            if not waiter.done():
                waiter.set_exception(self.make_loss_error())

    def _regulate(self) -> None:
        if self._wants_reading or not self._echoes:
            self._slack_bytes = ECHO_SLACK_BYTES
        reading = self._wants_reading or (bool(self._echoes) and self._slack_bytes > 0)
        if reading == self._reading or self._transport is None or self._transport.is_closing():
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()


class RqueueReconnector(reconnector.Reconnector[RqueueConnection]):
    """Keeps an rqueue client connected, and subscribes each new connection to `topics`."""

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        on_batch: Callable[[NotificationBatch], None],
        on_end: Callable[[RqueueConnection], None],
        on_failure: Callable[[PolybusError], None],
    ) -> None:
        super().__init__("rqueue", address, options, self._new_connection, on_end, on_failure)
        self.address = address
        self.options = options
        self.topics: dict[bytes, None] = {}  # ordered set of the subscriptions of every connection
        self.wants_reading = True
        self._on_batch = on_batch

    def set_reading(self, wanted: bool) -> None:
        self.wants_reading = wanted
        if self.connection is not None:
            self.connection.set_reading(wanted)

    async def _new_connection(self) -> RqueueConnection:
        most, reading = self.options.max_payload, self.wants_reading
        connection = RqueueConnection(
            self.address, most, self._on_batch, self.on_connection_ended, reading=reading
        )
        timeout_s = self.options.connect_timeout_s
        await reconnector.complete_handshake(
            connection, self._handshake(connection), timeout_s, "rqueue server"
        )
        connection.set_reading(self.wants_reading)
        return connection

    async def _handshake(self, connection: RqueueConnection) -> None:
        if connection.address.scheme not in ("tcp", "tls", "unix"):
            raise AddressError(
                f"rqueue address must be tcp://, tls:// or unix:, got {connection.address}"
            )
        await client_connection.connect(connection, self.options.tls)
        subscribes = [codec.subscribe(topic) for topic in (connection.probe_topic, *self.topics)]
        connection.write(b"".join(subscribes))
        # The echo proves that the peer speaks rqueue and that the subscriptions are in force.
        wait_s = self.options.connect_timeout_s * PROBE_TIME_SHARE
        try:
            await connection.echo(wait_s)
        except NotConnected:
            connection.has_echoes = False
            log.warning(UNCONFIRMED, connection.address, wait_s)
