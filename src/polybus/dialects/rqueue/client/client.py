"""The rqueue client for asyncio (any loop, uvloop included).

    async with rqueue.connect() as client:
        await client.subscribe("news")
        await client.publish("news", b"hello")
        async for message in client:
            print(message.topic, message.content)

For speed, use batches: `publish_many` sends one buffer for many messages, `batches` yields
the messages of one read from the socket together.

Guarantees:

- `subscribe`, `remove` and `deregister` return when they are in force.
- Messages larger than a frame are split and reassembled; such a message is ordered by the
  arrival of its last part.
- Delivery is at most once. When `publish` returns, the message is in the system's buffers;
  when `flush` returns, the server has it. If a connection ended with unconfirmed
  publishes, the next `flush` raises, and so does `close` if they were the last.
- If the program does not read, the client stops reading the socket, and the server then
  stops its publishers: no buffer grows without bound.
- After a lost connection the client reconnects and subscribes again. Messages published
  meanwhile are lost: `reconnects` counts such gaps.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from polybus.clients.reconnector import ReconnectingClient
from polybus.dialects.rqueue import codec
from polybus.dialects.rqueue.client.notification_batch import Message, NotificationBatch
from polybus.dialects.rqueue.client.rqueue_connection import RqueueConnection, RqueueReconnector
from polybus.dialects.rqueue.client.rqueue_publisher import Publisher
from polybus.dialects.rqueue.parts import PartLimits, Reassembler
from polybus.errors import ConnectionLost, PolybusError, UsageError
from polybus.model.address import Address
from polybus.model.limits import MIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_ADDRESS = "tcp://127.0.0.1:6567"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # Reconnect after a lost connection, with all subscriptions.
    reconnect: bool = True
    # Must equal the server's --max-payload: either side closes on a larger frame.
    max_payload: int = codec.DEFAULT_MAX_PAYLOAD
    # For tls:// addresses; None uses the system's certificates.
    tls: ssl.SSLContext | None = None
    # Received messages that were not read: above this, the client stops reading the socket.
    max_inbox_bytes: int = 16 * MIB
    # Name lookup, connecting and the first echo together.
    connect_timeout_s: float = 10.0
    # Wait of a call while the connection is down.
    wait_timeout_s: float = 30.0
    # Wait for an echo; back-pressure may delay publishers for a while.
    echo_timeout_s: float = 30.0
    # The first delay is short; it doubles up to the maximum while the bus is down.
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    # Limits for messages that arrive in parts.
    parts: PartLimits = PartLimits()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        codec.check_max_payload(self.max_payload)
        for name in ("max_inbox_bytes", "connect_timeout_s", "wait_timeout_s", "echo_timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be > 0, got {getattr(self, name)}")
        if not 0 < self.backoff_first_s <= self.backoff_max_s:
            raise UsageError(
                "backoff_first_s must be > 0 and <= backoff_max_s, got "
                f"{self.backoff_first_s} and {self.backoff_max_s}"
            )


class NotificationInbox:
    """Received batches that were not read. `on_taken` is called after each removal.

    Batches can be read whole or message by message, in any mixture: the unread rest of a
    batch is the next batch. `next_message` uses only the current batch, so a blocking
    reader may call it from its own thread and enter the event loop once per batch.
    """

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self.held_bytes = 0
        self._on_taken = on_taken
        self._batches: deque[NotificationBatch] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._current: NotificationBatch | None = None
        self._rest: Iterator[Message] = iter(())
        self._read = 0

    def put(self, batch: NotificationBatch) -> None:
        self.held_bytes += batch.memory_bytes
        self._batches.append(batch)
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """End the inbox. Readers get the remaining batches, then `error` or the end."""
        if not self._ended:
            self._ended, self._error = True, error
        self._changed.set()

    async def next_batch(self) -> NotificationBatch | None:
        """Wait for the next batch. Returns None at the end."""
        current, self._current, self._rest = self._current, None, iter(())
        if current is not None and self._read < len(current):
            return current[self._read :]
        return await self._take()

    def next_message(self) -> Message | None:
        """Return the next message of the current batch, or None if it has no more."""
        message = next(self._rest, None)
        self._read += 1
        return message

    async def start_batch(self) -> bool:
        """Wait for the next batch and make it current. Returns False at the end."""
        batch = await self._take()
        if batch is None:
            return False
        self._current, self._rest, self._read = batch, iter(batch), 0
        return True

    async def _take(self) -> NotificationBatch | None:
        while not self._batches:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        batch = self._batches.popleft()
        self.held_bytes -= batch.memory_bytes
        self._on_taken()
        return batch


log = logging.getLogger("polybus.rqueue")

# A connection may end during a subscribe. After this many attempts the cause is the request.
MAX_ATTEMPTS = 3

DEFAULTS = ClientOptions()


class Client(ReconnectingClient[RqueueConnection]):
    """One client of one server. Use it in `async with`, or call `open` and `close`."""

    def __init__(self, address: str | Address, options: ClientOptions) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options
        self._reconnector: RqueueReconnector = RqueueReconnector(
            self.address, options, self._receive, self._on_connection_end, self._end
        )
        self._publishing = Publisher(self._reconnector, options)
        self.inbox = NotificationInbox(self._update_reading)
        self._parts = Reassembler(options.parts)
        self._parts_timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- opening and closing

    async def open(self) -> None:
        """Connect. Raises NotConnected if no rqueue server answers. `async with` calls it."""
        await self._reconnector.open()

    async def close(self) -> None:
        """Flush, then disconnect. Received messages can still be read.

        Raises the errors of `flush` after disconnecting. A loss after which more was
        published was logged at its time and is not raised here.
        """
        if self._closed:
            return
        self._publishing.discard_logged_loss()
        try:
            await self.flush()
        finally:
            await self._disconnect()

    async def _on_exit(self, error: BaseException | None) -> None:
        # After an error in the block, a flush may wait for a bus that is down.
        await (self.close() if error is None else self._disconnect())

    # --- subscribing

    async def subscribe(self, *topics: str | bytes) -> None:
        """Subscribe to topics. Returns when the subscriptions are in force.

        They are kept over reconnects, until `remove` or `deregister`. Raises ConnectionLost
        if the server closes the connection at each attempt, because one of its limits is
        reached; the subscriptions are then unchanged.
        """
        names = [codec.topic_bytes(topic) for topic in topics]
        frames = b"".join(map(codec.subscribe, names))
        await self._apply_control(lambda connection: frames)
        self._reconnector.topics.update(dict.fromkeys(names))

    async def remove(self, *topics: str | bytes) -> None:
        """Unsubscribe from topics. Returns when it is in force."""
        names = [codec.topic_bytes(topic) for topic in topics]
        for name in names:
            self._reconnector.topics.pop(name, None)
        frames = b"".join(map(codec.remove, names))
        await self._apply_control(lambda connection: frames)

    async def deregister(self) -> None:
        """Unsubscribe from all topics. Returns when it is in force."""
        self._reconnector.topics.clear()
        # DEREGISTER also removes the connection's probe topic: subscribe to it again.
        await self._apply_control(
            lambda connection: codec.deregister() + codec.subscribe(connection.probe_topic)
        )

    # --- publishing

    async def publish(self, topic: str | bytes, content: Buffer) -> None:
        """Publish one message of up to 64 MiB.

        Waits while the connection is down or its write buffer is full. Raises NotConnected
        if it stays down, ConnectionLost if it ends while waiting for room.
        """
        await self._publishing.publish_run(codec.topic_bytes(topic), (content,), 0)

    async def publish_many(self, topic: str | bytes, contents: Iterable[Buffer]) -> None:
        """Publish many messages, in order, in few large writes.

        If the iterable raises, some of the first messages may have been published.
        """
        await self._publishing.publish_many(codec.topic_bytes(topic), contents)

    async def flush(self) -> None:
        """Wait until the server has accepted everything published so far.

        Raises ConnectionLost if a connection ended since the last flush before all its
        publishes were confirmed: some of them may be lost.
        """
        await self._publishing.flush()

    # --- receiving

    def batches(self) -> AsyncIterator[NotificationBatch]:
        """Iterate over received batches until the client is closed.

        Several iterators share the batches: each batch goes to one of them.
        """
        return _Batches(self.inbox)

    async def next_batch(self, timeout_s: float | None = None) -> NotificationBatch | None:
        """Return the next batch, or None if none arrives in time or the client is closed."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.inbox.next_batch()
        except TimeoutError:
            return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while (message := self.inbox.next_message()) is None:
            if not await self.inbox.start_batch():
                raise StopAsyncIteration
        return message

    # --- state and counters

    @property
    def lost_parts(self) -> int:
        """Number of received PARTs whose messages were never completed."""
        return self._parts.lost_parts

    @property
    def lost_messages(self) -> dict[str, int]:
        """Number of abandoned large messages, by reason."""
        return {str(reason): count for reason, count in self._parts.lost.items()}

    @property
    def inbox_bytes(self) -> int:
        """Bytes of received messages that were not read."""
        return self.inbox.held_bytes

    # --- helpers

    async def _apply_control(self, frames: Callable[[RqueueConnection], bytes]) -> None:
        """Send control frames and wait for an echo. Retries on a new connection if one ends."""
        for _ in range(MAX_ATTEMPTS):
            connection = await self._reconnector.wait_connected()
            try:
                if connection.write(frames(connection)):
                    await self._publishing.echo(connection)
            except ConnectionLost:
                pass
            # `write` returns False, without an error, if the connection has ended.
            if connection.is_up:
                return
            await connection.ended.wait()
        raise ConnectionLost(f"{self.last_loss} (after {MAX_ATTEMPTS} attempts)")

    def _receive(self, batch: NotificationBatch) -> None:
        if batch.part_count:
            now = asyncio.get_running_loop().time()
            wholes = {}
            for number, part in enumerate(batch.parts()):
                whole = self._parts.add(part, now)
                if whole is not None:
                    wholes[number] = whole
            self._schedule_part_expiry()
            batch = batch.with_wholes(wholes)
        if len(batch):
            self.inbox.put(batch)
            self._update_reading()

    def _schedule_part_expiry(self) -> None:
        deadline = self._parts.next_deadline()
        if deadline is not None and self._parts_timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._parts_timer = loop.call_at(deadline, self._expire_parts)

    def _expire_parts(self) -> None:
        self._parts_timer = None
        late = self._parts.expire(asyncio.get_running_loop().time())
        if late:
            log.warning("abandoned %d incomplete messages: no further part arrived in time", late)
        self._schedule_part_expiry()

    def _update_reading(self) -> None:
        # Stop at the limit and resume at half of it, so as not to switch with every batch.
        if self.inbox.held_bytes > self.options.max_inbox_bytes:
            self._reconnector.set_reading(False)
        elif self.inbox.held_bytes <= self.options.max_inbox_bytes // 2:
            self._reconnector.set_reading(True)

    def _on_connection_end(self, connection: RqueueConnection) -> None:
        self._publishing.on_connection_end(connection, report=not self._closed)

    def _end(self, error: PolybusError) -> None:
        self.inbox.end(None if self._closed else error)

    async def _disconnect(self) -> None:
        self._closed = True
        if self._parts_timer is not None:
            self._parts_timer.cancel()
        await self._reconnector.close()


class _Batches:
    """An async iterator that survives cancellation: `asyncio.wait_for` may wrap its steps."""

    def __init__(self, inbox: NotificationInbox) -> None:
        self._inbox = inbox

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NotificationBatch:
        batch = await self._inbox.next_batch()
        if batch is None:
            raise StopAsyncIteration
        return batch


def connect(
    address: str | Address = DEFAULT_ADDRESS,
    *,
    reconnect: bool = True,
    max_payload: int = codec.DEFAULT_MAX_PAYLOAD,
    tls: ssl.SSLContext | None = None,
    max_inbox_bytes: int = DEFAULTS.max_inbox_bytes,
    connect_timeout_s: float = DEFAULTS.connect_timeout_s,
    wait_timeout_s: float = DEFAULTS.wait_timeout_s,
    echo_timeout_s: float = DEFAULTS.echo_timeout_s,
    backoff_first_s: float = DEFAULTS.backoff_first_s,
    backoff_max_s: float = DEFAULTS.backoff_max_s,
    parts: PartLimits | None = None,
) -> Client:
    """Return a client of the server at `address` (tcp://, tls:// or unix:), for a `with`.

    `ClientOptions` documents the settings.
    """
    return Client(
        address,
        ClientOptions(
            reconnect=reconnect,
            max_payload=max_payload,
            tls=tls,
            max_inbox_bytes=max_inbox_bytes,
            connect_timeout_s=connect_timeout_s,
            wait_timeout_s=wait_timeout_s,
            echo_timeout_s=echo_timeout_s,
            backoff_first_s=backoff_first_s,
            backoff_max_s=backoff_max_s,
            parts=parts or PartLimits(),
        ),
    )
