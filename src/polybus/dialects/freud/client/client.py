"""The Freud client for asyncio (any loop, uvloop included).

    async with freud.connect() as client:
        await client.create_topic("news")
        async with await client.subscribe("news") as news:
            await client.produce("news", b"hello")
            async for record in news:
                print(record.message_id, record.timestamp_ns, record.body)

For speed, use batches: `produce_many` and `Subscription.get_many` send many requests in
one buffer, and iteration fetches ahead.

Guarantees:

- Every request returns the bus's answer: a value for Ok and Nothing Happened, an error for
  the other codes. A cancelled call may have been executed.
- Any number of tasks may make requests at the same time. They share one connection, and
  are answered in the order in which they were sent. Each subscription has a connection of
  its own, so reading delays no other request.
- A cancelled `get` loses no message.
- The client never reconnects. Topics and subscriptions live in the bus's memory and may be
  lost with it: when the connection ends, every waiting and every later call raises
  `ConnectionLost`.
- `close` unsubscribes. The bus keeps the subscriptions of a program that died, and those that
  were detached, for its `detached_subscription_s`; `attach` continues one by its id.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polybus.clients.async_client import AsyncClient
from polybus.dialects.freud import codec
from polybus.dialects.freud.client.answer_batch import Answer, encode_run
from polybus.dialects.freud.client.freud_connection import FreudConnection, ProduceAnswers, dial
from polybus.dialects.freud.client.pull_subscription import Subscription, SubscriptionInbox
from polybus.dialects.freud.codec import Code
from polybus.errors import (
    BadFrame,
    ConnectionLost,
    Denied,
    DoesNotExist,
    LimitReached,
    MalformedRequest,
    NotConnected,
    PeerError,
    PolybusError,
    TooLarge,
    UsageError,
)
from polybus.model.address import Address
from polybus.model.limits import KIB
from polybus.model.socket_path import find_socket
from polybus.model.topic_name import check_topic_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

SOCKET_NAME = "freud.sock"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # Should equal the bus's setting: it answers larger frames Malformed Request and closes.
    max_frame_bytes: int = codec.DEFAULT_MAX_FRAME_BYTES
    # Messages that iteration over a subscription requests at once. Fetched messages are
    # lost if the program dies before it reads them; 1 fetches one by one.
    prefetch: int = 256
    # Connecting, and the first answer.
    connect_timeout_s: float = 10.0
    # Wait for an answer; a full push reader may delay a Produce.
    answer_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        codec.check_max_frame_bytes(self.max_frame_bytes)
        for name in ("prefetch", "connect_timeout_s", "answer_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be > 0, got {getattr(self, name)}")

    @property
    def max_answer_bytes(self) -> int:
        """The largest answer that is accepted: a record of the largest possible message."""
        own = self.max_frame_bytes + codec.RECORD_HEADER.size
        return max(codec.DEFAULT_MAX_ANSWER_BYTES, own)


def default_address() -> Address:
    """Return Freud's socket of this user's bus or, if there is none, of the machine's bus."""
    return Address.parse(f"unix:{find_socket(SOCKET_NAME, os.environ)}")


# Limit for unsubscribing at close, in case the bus is busy.
CLOSE_TIMEOUT_S = 1.0
# No subscription has this id: a request with it shows that the bus answers.
UNKNOWN_SUBSCRIBER = bytes(codec.SUBSCRIBER_ID_BYTES)

DEFAULTS = ClientOptions()


class Client(AsyncClient):
    """One client of one bus. Use it in `async with`, or call `open` and `close`."""

    def __init__(self, address: str | Address, options: ClientOptions) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options
        self._connection: FreudConnection | None = None
        self._subscriptions: dict[bytes, Subscription] = {}
        self._closed = False

    # --- opening and closing

    async def open(self) -> None:
        """Connect. Raises NotConnected if no bus answers. `async with` calls it."""
        if self._connection is not None:
            raise UsageError("a client can be opened only once; create another one")
        self._connection, answer = await self._dial(codec.unsubscribe(UNKNOWN_SUBSCRIBER))
        if answer.code != Code.DOESNT_EXIST:
            self._connection.abort()
            raise error_from_answer(answer, "speak to", str(self.address))

    async def close(self) -> None:
        """End all subscriptions, then disconnect. Never raises."""
        if self._connection is None or self._closed:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                left = [open_.unsubscribe() for open_ in list(self._subscriptions.values())]
                await asyncio.gather(*left, return_exceptions=True)
        except TimeoutError:
            pass  # the bus ends them after detached_subscription_s
        finally:
            self._closed = True
            self._connection.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._connection.ended.wait()
        except TimeoutError:
            self._connection.abort()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_up

    # --- topics

    async def create_topic(self, topic: str) -> bool:
        """Create a topic. Returns False if it exists already (Nothing Happened).

        A topic that is being deleted is created again: its messages are buffered until
        the readers of the old topic have read their notice.
        """
        return await self._request_change(
            codec.create_topic(check_topic_name(topic)), "create topic", topic
        )

    async def delete_topic(self, topic: str) -> bool:
        """Mark a topic for deletion. Returns False if there is none, or it is marked already.

        Its readers read their unread messages, then the notice. Raises Denied unless the
        caller created the topic or a rule allows it.
        """
        return await self._request_change(
            codec.delete_topic(check_topic_name(topic)), "delete topic", topic
        )

    async def list_topics(self) -> list[str]:
        """Return the topics that the caller created or may produce to, subscribe to or delete."""
        answer = await self._ask(codec.list_topics())
        if answer.code != Code.OK:
            raise error_from_answer(answer, "list", "topics")
        names = codec.read_topics(answer.payload)
        return [name.decode("utf-8", "backslashreplace") for name in names]

    async def count_subscribers(self, topic: str) -> int:
        """Return the number of subscribers of a topic in all dialects."""
        answer = await self._ask(codec.count_subscribers(check_topic_name(topic)))
        if answer.code != Code.OK:
            raise error_from_answer(answer, "count the subscribers of", repr(topic))
        return codec.read_count(answer.payload)

    # --- producing

    async def produce(self, topic: str, body: Buffer) -> int | None:
        """Produce one message. Returns its id, or None if the topic has no subscriber."""
        answer = await self._ask(
            codec.produce(check_topic_name(topic), body, self.options.max_frame_bytes)
        )
        if answer.code == Code.OK:
            return codec.read_message_id(answer.payload)
        if answer.code == Code.NOTHING_HAPPENED:
            return None
        raise error_from_answer(answer, "produce to", repr(topic))

    async def produce_many(self, topic: str, bodies: Iterable[Buffer]) -> list[int | None]:
        """Produce messages in order, without waiting for each. Returns their ids, or None each.

        If the bus refuses one, no more are sent and the refusal is raised; in-flight later
        messages may have been accepted, and a note of the error says how many were. If
        `bodies` raises, or has a body that is too large, the bodies before it are produced.
        """
        if isinstance(bodies, bytes | bytearray | memoryview | str):
            raise TypeError("bodies must be an iterable of bodies; use produce for a single one")
        options = self.options
        producing = PipelinedProduce(
            self._require_connection(),
            check_topic_name(topic),
            options.max_frame_bytes,
            options.answer_timeout_s,
        )
        await producing.run(bodies)
        answers = producing.answers
        if answers.refused is not None:
            error = error_from_answer(answers.refused, "produce to", repr(topic))
            accepted = sum(message_id is not None for message_id in answers.ids)
            error.add_note(f"{accepted} messages of this call were accepted")
            raise error
        return answers.ids

    # --- subscribing

    async def subscribe(self, topic: str) -> Subscription:
        """Receive the messages produced to a topic from now on. Raises DoesNotExist.

        The subscription has a connection of its own (`quota_connections` counts it).
        Use it in `async with`, or call its `unsubscribe`.
        """
        self._require_connection()
        connection, answer = await self._dial(codec.subscribe(check_topic_name(topic)))
        if answer.code != Code.OK:
            connection.close()
            raise error_from_answer(answer, "subscribe to", repr(topic))
        return self._open_subscription(topic, codec.read_subscriber(answer.payload), connection)

    async def attach(self, subscriber_id: bytes) -> Subscription:
        """Continue a detached subscription of this user (`Subscription.detach`).

        Its `topic` is not known, and empty. Whether the id exists shows when it is read: an
        unknown one raises DoesNotExist then. Raises UsageError if it is open in this client.
        """
        if subscriber_id in self._subscriptions:
            raise UsageError(f"subscription {subscriber_id.hex()} is open in this client")
        request = codec.unsubscribe(UNKNOWN_SUBSCRIBER)
        codec.check_subscriber(subscriber_id)
        self._require_connection()
        connection, answer = await self._dial(request)
        if answer.code != Code.DOESNT_EXIST:
            connection.close()
            raise error_from_answer(answer, "attach to", subscriber_id.hex())
        return self._open_subscription("", subscriber_id, connection)

    # --- helpers

    def _open_subscription(
        self, topic: str, subscriber: bytes, connection: FreudConnection
    ) -> Subscription:
        async def wait_for_bus() -> None:
            await self._ask(codec.unsubscribe(UNKNOWN_SUBSCRIBER))

        def forget() -> None:
            self._subscriptions.pop(subscriber, None)

        inbox = SubscriptionInbox(topic, subscriber, connection, self.options, wait_for_bus, forget)
        subscription = Subscription(topic, subscriber, inbox, self._unsubscribe)
        self._subscriptions[subscriber] = subscription
        return subscription

    def _require_connection(self) -> FreudConnection:
        if self._connection is None:
            raise UsageError("the client is not open; use it in a `with`, or call open()")
        if self._closed:
            raise NotConnected("the client is closed")
        if not self._connection.is_up:
            raise self._connection.make_loss_error()
        return self._connection

    async def _ask(self, request: bytes) -> Answer:
        return await self._require_connection().ask(request, self.options.answer_timeout_s)

    async def _request_change(self, request: bytes, verb: str, topic: str) -> bool:
        answer = await self._ask(request)
        if answer.code in (Code.OK, Code.NOTHING_HAPPENED):
            return answer.code == Code.OK
        raise error_from_answer(answer, verb, repr(topic))

    async def _dial(self, first: bytes) -> tuple[FreudConnection, Answer]:
        """Connect and send a first request. Returns the connection and the answer."""
        timeout_s = self.options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                connection = await dial(self.address, self.options.max_answer_bytes)
        except TimeoutError:
            raise NotConnected(
                f"timed out connecting to {self.address}: its backlog is full"
            ) from None
        try:
            return connection, await connection.ask(first, timeout_s)
        except ConnectionLost as error:
            raise NotConnected(f"cannot connect to {error}") from None
        except BaseException:
            connection.abort()
            raise

    async def _unsubscribe(self, subscription: Subscription) -> None:
        """Unsubscribe on the subscription's connection or, if a Get waits there, on this one."""
        connection = subscription.inbox.idle_connection or self._require_connection()
        request = codec.unsubscribe(subscription.id)
        answer = await connection.ask(request, self.options.answer_timeout_s)
        if answer.code not in (Code.OK, Code.DOESNT_EXIST):
            raise error_from_answer(answer, "unsubscribe from", repr(subscription.topic))


def connect(
    address: str | Address | None = None,
    *,
    max_frame_bytes: int = DEFAULTS.max_frame_bytes,
    prefetch: int = DEFAULTS.prefetch,
    connect_timeout_s: float = DEFAULTS.connect_timeout_s,
    answer_timeout_s: float = DEFAULTS.answer_timeout_s,
) -> Client:
    """Return a client of the bus at `address` (unix:/path), to be used in a `with`.

    The default address is that of this user's bus or, if there is none, of the machine's
    bus in /run/polybus. `ClientOptions` documents the settings.
    """
    return Client(
        default_address() if address is None else address,
        ClientOptions(
            max_frame_bytes=max_frame_bytes,
            prefetch=prefetch,
            connect_timeout_s=connect_timeout_s,
            answer_timeout_s=answer_timeout_s,
        ),
    )


# Requests are encoded in buffers of about this size: few writes, and the first one early.
RUN_BYTES = 256 * KIB
# Bodies taken from an iterable at once.
GROUP = 4096


class PipelinedProduce:
    """One call of `produce_many`: sends Produces without waiting for each answer."""

    def __init__(
        self, connection: FreudConnection, name: bytes, max_frame_bytes: int, timeout_s: float
    ) -> None:
        self.answers = ProduceAnswers()
        self._connection = connection
        self._name = name
        self._max_frame_bytes = max_frame_bytes
        self._timeout_s = timeout_s

    async def run(self, bodies: Iterable[Buffer]) -> None:
        """Send until the end or the first refusal, then wait for the answers."""
        items = iter(bodies)
        try:
            while group := list(itertools.islice(items, GROUP)):
                if not await self._send(group):
                    break
            await self.answers.wait_all(self._timeout_s)
        except TimeoutError:
            raise self._connection.timeout_error(self._timeout_s) from None
        except ConnectionLost:
            if self.answers.refused is None:  # else the bus closed because of it
                raise

    async def _send(self, group: Sequence[Buffer]) -> bool:
        place = 0
        while place < len(group) and self.answers.refused is None:
            data, after = encode_run(self._name, group, place, self._max_frame_bytes, RUN_BYTES)
            if after == place:
                raise self._too_large(group[place])
            async with asyncio.timeout(self._timeout_s):
                await self._connection.wait_room()
            self.answers.expect(after - place)
            self._connection.send(data, after - place, self.answers)
            place = after
        return self.answers.refused is None

    def _too_large(self, body: Buffer) -> TooLarge:
        most = codec.max_body(self._name, self._max_frame_bytes)
        return TooLarge(f"body must have at most {most} bytes, got {memoryview(body).nbytes}")


# The text of a Server Error for a quota is the name of the quota alone.
_SETTING = re.compile(r"[a-z]+(_[a-z]+)+")


def error_from_answer(answer: Answer, request: str, subject: str) -> PolybusError:
    """Return the error for an answer to `request`, such as 'produce to', on `subject`."""
    text = answer.payload.decode("utf-8", "backslashreplace")
    match answer.code:
        case Code.NO:
            return Denied(f"not allowed to {request} {subject}")
        case Code.DOESNT_EXIST:
            return DoesNotExist(f"cannot {request} {subject}: it does not exist")
        case Code.MALFORMED_REQUEST:
            return MalformedRequest(f"cannot {request} {subject}: {text or 'malformed request'}")
        case Code.SERVER_ERROR if _SETTING.fullmatch(text):
            return LimitReached(text, f"cannot {request} {subject}: {text} is reached")
        case Code.SERVER_ERROR:
            return PeerError(f"cannot {request} {subject}: the bus failed: {text or 'no reason'}")
    return BadFrame("unexpected_code")
