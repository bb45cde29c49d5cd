"""The rqueue client for asyncio (any loop, uvloop included).

    async with rqueue.connect() as client:
        await client.subscribe("news")
        await client.publish("news", b"hello")
        async for message in client:
            print(message.topic, message.content)

For speed think in batches: `publish_many` sends one buffer for many messages,
`batches` gives what one read from the socket brought.

What the client promises:

- `subscribe`, `remove` and `deregister` return when they are in force.
- Messages larger than a frame are split and put together on the way; one takes
  its place in the order where its last part arrived.
- Delivery is at most once. A publish that returned was handed to the system;
  `flush` returns when the server has it. If a connection ended with publishes
  not known to be taken, the next `flush` says so, and `close` if they were the last.
- A user who does not read makes the client stop reading, and then the server
  stop its publishers: nothing grows without bound.
- After a lost connection the client comes back by itself, subscribed as before.
  What was published meanwhile by others is gone: `reconnects` counts such gaps.


What can be set on an rqueue client, with the reason for each default.

What a client has received and its user has not read yet.

Batches wait in the order they came. They can be read by the batch or message by
message, in any mixture: the rest of a batch that was begun is the next batch.
`held_bytes` is what waits; whoever fills the inbox keeps it within bounds by not
reading from the socket.

`next_message` takes only from the batch that was begun and touches nothing
else, so a blocking reader may call it from a thread of its own and bother the
event loop once per batch.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

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

    # Come back by itself after a lost connection, with all subscriptions.
    reconnect: bool = True
    # Must be the server's --max-payload: over it, the server hangs up and so do we.
    max_payload: int = codec.DEFAULT_MAX_PAYLOAD
    # For tls:// addresses; None means the system's certificates.
    tls: ssl.SSLContext | None = None
    # Received and not yet read: over this the client stops reading from the socket.
    max_inbox_bytes: int = 16 * MIB
    # Name lookup, connecting and the first echo together.
    connect_timeout_s: float = 10.0
    # How long a call waits for a connection that is down.
    wait_timeout_s: float = 30.0
    # How long a call waits for the server to get to it; publishers may be held up for a while.
    echo_timeout_s: float = 30.0
    # Reconnecting starts quickly, doubles, and stays polite to a bus that is down for long.
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    # Bounds on messages that arrive in parts.
    parts: PartLimits = PartLimits()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        codec.check_max_payload(self.max_payload)
        for name in ("max_inbox_bytes", "connect_timeout_s", "wait_timeout_s", "echo_timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be more than 0")
        if not 0 < self.backoff_first_s <= self.backoff_max_s:
            raise UsageError("backoff_first_s must be more than 0 and at most backoff_max_s")


class NotificationInbox:
    """See the top of the file. `on_taken` is called when there is room again."""

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
        """Nothing more will come. Readers get what waits, then `error` or the end."""
        if not self._ended:
            self._ended, self._error = True, error
        self._changed.set()

    async def next_batch(self) -> NotificationBatch | None:
        """The next batch, waiting for it; None at the end."""
        rest = self._take_rest()
        return rest if rest is not None else await self._take()

    def next_message(self) -> Message | None:
        """The next message of the batch that was begun; None if `begin` is needed."""
        message = next(self._rest, None)
        self._read += 1
        return message

    async def start_batch(self) -> bool:
        """Begin the next batch, waiting for it; False at the end."""
        batch = await self._take()
        if batch is None:
            return False
        self._current, self._rest, self._read = batch, iter(batch), 0
        return True

    def _take_rest(self) -> NotificationBatch | None:
        begun, read = self._current, self._read
        self._current, self._rest = None, iter(())
        return begun[read:] if begun is not None and read < len(begun) else None

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

# A link may end while it is asked to subscribe; if so many do, it is because of the asking.
MAX_ATTEMPTS = 3

DEFAULTS = ClientOptions()


class Client:
    """One client of one server. Use it in `async with`, or call `open` and `close`."""

    def __init__(self, address: str | Address, options: ClientOptions) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options
        self._lifeline = RqueueReconnector(
            self.address, options, self._receive, self._on_connection_end, self._end
        )
        self._publishing = Publisher(self._lifeline, options)
        self.inbox = NotificationInbox(self._update_reading)
        self._parts = Reassembler(options.parts)
        self._parts_timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- opening and closing

    async def open(self) -> None:
        """Connect; `NotConnected` if no rqueue server answers. `async with` calls it."""
        await self._lifeline.open()

    async def close(self) -> None:
        """Flush, then disconnect. What was received can still be read.

        Raises what `flush` raises, and disconnects all the same. A loss after
        which more was published was logged then, and is not raised now.
        """
        if self._closed:
            return
        self._publishing.discard_logged_loss()
        try:
            await self.flush()
        finally:
            await self._disconnect()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await (self.close() if error is None else self._disconnect())

    # --- what to receive

    async def subscribe(self, *topics: str | bytes) -> None:
        """Receive these topics from now on; returns when it is in force.

        They stay subscribed over reconnects, until `remove` or `deregister`.
        `ConnectionLost` if the server hangs up each time it is asked: then a
        limit of its own is reached, and the client is as it was before.
        """
        names = [codec.topic_bytes(topic) for topic in topics]
        frames = b"".join(map(codec.subscribe, names))
        await self._apply_control(lambda link: frames)
        self._lifeline.topics.update(dict.fromkeys(names))

    async def remove(self, *topics: str | bytes) -> None:
        """Receive these topics no more; returns when it is in force."""
        names = [codec.topic_bytes(topic) for topic in topics]
        for name in names:
            self._lifeline.topics.pop(name, None)
        frames = b"".join(map(codec.remove, names))
        await self._apply_control(lambda link: frames)

    async def deregister(self) -> None:
        """Receive nothing more; returns when it is in force."""
        self._lifeline.topics.clear()
        # It takes the link's own probe topic too, which comes back at once.
        await self._apply_control(
            lambda link: codec.deregister() + codec.subscribe(link.probe_topic)
        )

    # --- publishing

    async def publish(self, topic: str | bytes, content: Buffer) -> None:
        """Publish one message of up to 64 MiB.

        Waits while the connection is down or full; `NotConnected` if it stays
        down, `ConnectionLost` if it ends while waiting for room.
        """
        await self._publishing.publish_run(codec.topic_bytes(topic), (content,), 0)

    async def publish_many(self, topic: str | bytes, contents: Iterable[Buffer]) -> None:
        """Publish many messages, in order, in few large writes.

        Any iterable will do. If it raises, some first part of the messages may
        have been published.
        """
        await self._publishing.publish_many(codec.topic_bytes(topic), contents)

    async def flush(self) -> None:
        """Return when the server has taken everything published so far.

        `ConnectionLost` if a connection ended, since the last flush, with
        publishes not known to be taken: some of them may not have arrived.
        """
        await self._publishing.flush()

    # --- receiving

    def batches(self) -> AsyncIterator[NotificationBatch]:
        """All that comes, batch by batch, until the client is closed.

        Several iterators share what comes: each batch goes to one of them.
        """
        return _Batches(self.inbox)

    async def next_batch(self, timeout_s: float | None = None) -> NotificationBatch | None:
        """The next batch; None if nothing came in time, or the client is closed."""
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

    # --- how it is going

    @property
    def is_connected(self) -> bool:
        return self._lifeline.link is not None

    @property
    def reconnects(self) -> int:
        """How often the client came back; each time others' messages may have been missed."""
        return self._lifeline.reconnects

    @property
    def last_loss(self) -> str | None:
        """Why the last connection or attempt failed."""
        return self._lifeline.last_loss

    @property
    def lost_parts(self) -> int:
        """PARTs received in vain, their messages never complete."""
        return self._parts.lost_parts

    @property
    def lost_messages(self) -> dict[str, int]:
        """Large messages that were given up, by reason."""
        return {str(reason): count for reason, count in self._parts.lost.items()}

    @property
    def inbox_bytes(self) -> int:
        """Received and not yet read."""
        return self.inbox.held_bytes

    # --- inside

    async def _apply_control(self, frames: Callable[[RqueueConnection], bytes]) -> None:
        """Send control frames and wait for an echo, on the next link if this one ends first."""
        for _ in range(MAX_ATTEMPTS):
            if await self._try_control(await self._lifeline.wait_connected(), frames):
                return
        raise ConnectionLost(f"asked {MAX_ATTEMPTS} times, {self.last_loss}")

    async def _try_control(
        self, link: RqueueConnection, frames: Callable[[RqueueConnection], bytes]
    ) -> bool:
        """True if the frames are in force on this link; False once it has ended."""
        try:
            if link.write(frames(link)):
                await self._publishing.echo(link)
        except ConnectionLost:
            pass
        if link.is_up:
            return True
        await link.ended.wait()
        return False

    def _receive(self, batch: NotificationBatch) -> None:
        if batch.part_count:
            batch = self._assemble(batch)
        if len(batch):
            self.inbox.put(batch)
            self._update_reading()

    def _assemble(self, batch: NotificationBatch) -> NotificationBatch:
        now = asyncio.get_running_loop().time()
        wholes = {}
        for number, part in enumerate(batch.parts()):
            whole = self._parts.add(part, now)
            if whole is not None:
                wholes[number] = whole
        self._schedule_part_expiry()
        return batch.with_wholes(wholes)

    def _schedule_part_expiry(self) -> None:
        deadline = self._parts.next_deadline()
        if deadline is not None and self._parts_timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._parts_timer = loop.call_at(deadline, self._expire_parts)

    def _expire_parts(self) -> None:
        self._parts_timer = None
        late = self._parts.expire(asyncio.get_running_loop().time())
        if late:
            log.warning("%d incomplete messages given up: their parts stopped coming", late)
        self._schedule_part_expiry()

    def _update_reading(self) -> None:
        # Stop at the bound, go on at half of it: not at every batch.
        if self.inbox.held_bytes > self.options.max_inbox_bytes:
            self._lifeline.set_reading(False)
        elif self.inbox.held_bytes <= self.options.max_inbox_bytes // 2:
            self._lifeline.set_reading(True)

    def _on_connection_end(self, link: RqueueConnection) -> None:
        self._publishing.on_connection_end(link, tell=not self._closed)

    def _end(self, error: PolybusError) -> None:
        self.inbox.end(None if self._closed else error)

    async def _disconnect(self) -> None:
        self._closed = True
        if self._parts_timer is not None:
            self._parts_timer.cancel()
        await self._lifeline.close()


class _Batches:
    """An async iterator that survives cancellation, so `asyncio.wait_for` may wrap its steps."""

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
    """A client of the server at `address` (tcp://, tls:// or unix:), to be used in a `with`.

    See `ClientOptions` for what each setting does.
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
