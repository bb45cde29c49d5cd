"""The Freud client for asyncio (any loop, uvloop included).

    async with freud.connect() as client:
        await client.create_topic("news")
        async with await client.subscribe("news") as news:
            await client.produce("news", b"hello")
            async for record in news:
                print(record.message_id, record.timestamp_ns, record.body)

For speed think in batches: `produce_many` and `Subscription.get_many` send many
requests in one buffer, and iteration fetches ahead.

What the client promises:

- Every request returns what the bus answered: a value for Ok and Nothing
  Happened, an error for the others. A call that was cancelled may have been
  carried out.
- Requests may be made at the same time, by any number of tasks; they share one
  connection, and are answered in the order in which they were sent. Each
  subscription has a connection of its own: reading holds up nothing else.
- A cancelled `get` loses no message.
- It never reconnects. Topics and subscriptions live in the bus's memory: when the
  connection is lost they may be gone, and everything that waits, and every later
  call, raises `ConnectionLost`.
- `close` unsubscribes. What a program that dies has subscribed is reaped by the
  bus after its `subscriber_timeout_s`.


What can be set on a Freud client, with the reason for each default.

Many Produces to one topic, sent without waiting for each answer.

What an answer other than Ok and Nothing Happened means to a caller: an error of the tree.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

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
from polybus.model import topic_name
from polybus.model.address import Address
from polybus.model.limits import KIB
from polybus.model.socket_path import find_socket

if TYPE_CHECKING:
    from typing_extensions import Buffer

SOCKET_NAME = "freud.sock"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # Should be the bus's own: what is larger it answers Malformed Request, and hangs up.
    max_frame_bytes: int = codec.DEFAULT_MAX_FRAME_BYTES
    # Iterating over a subscription asks for up to so many messages at once. What was
    # fetched and not yet looked at is lost if the program dies; 1 fetches one by one.
    prefetch: int = 256
    # Finding the bus, and its first answer.
    connect_timeout_s: float = 10.0
    # How long a request waits for its answer; a Produce may be held up by a full push reader.
    answer_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        codec.check_max_frame_bytes(self.max_frame_bytes)
        for name in ("prefetch", "connect_timeout_s", "answer_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0")

    @property
    def max_answer_bytes(self) -> int:
        """The largest answer that is believed: a record of the largest message there can be."""
        own = self.max_frame_bytes + codec.RECORD_HEADER.size
        return max(codec.DEFAULT_MAX_ANSWER_BYTES, own)


def default_address() -> Address:
    """Freud's socket of this user's bus; if there is none, that of the machine's, root's."""
    return Address.parse(f"unix:{find_socket(SOCKET_NAME, os.environ)}")


# At the end subscriptions are given back; a bus that is held up is not waited for.
CLOSE_TIMEOUT_S = 1.0
# No subscription has this id: asking for it is how to see that the bus answers.
UNKNOWN_SUBSCRIBER = bytes(codec.SUBSCRIBER_ID_BYTES)

DEFAULTS = ClientOptions()


class Client:
    """One client of one bus. Use it in `async with`, or call `open` and `close`."""

    def __init__(self, address: str | Address, options: ClientOptions) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options
        self._link: FreudConnection | None = None
        self._subscriptions: dict[bytes, Subscription] = {}
        self._closed = False

    # --- opening and closing

    async def open(self) -> None:
        """Connect; `NotConnected` if no bus answers. `async with` calls it."""
        if self._link is not None:
            raise UsageError("a client connects once: make another one")
        self._link, answer = await self._dial(codec.unsubscribe(UNKNOWN_SUBSCRIBER))
        if answer.code != Code.DOESNT_EXIST:
            self._link.abort()
            raise error_from_answer(answer, "speak to", str(self.address))

    async def close(self) -> None:
        """End all subscriptions, then disconnect. Raises nothing: what can be done is done."""
        if self._link is None or self._closed:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                left = [one.unsubscribe() for one in list(self._subscriptions.values())]
                await asyncio.gather(*left, return_exceptions=True)
        except TimeoutError:
            pass  # the bus reaps them
        finally:
            self._closed = True
            self._link.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._link.ended.wait()
        except TimeoutError:
            self._link.abort()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_up

    # --- topics

    async def create_topic(self, topic: str) -> bool:
        """Create it; False if it was there already (Nothing Happened).

        A topic that is being deleted is created anew: what is produced waits until
        the readers of the old one have read their notice.
        """
        return await self._request_change(codec.create_topic(_name(topic)), "create topic", topic)

    async def delete_topic(self, topic: str) -> bool:
        """Mark it for deletion; False if there is none, or it was marked already.

        Its readers read what they still have, then the notice. Only its creator may,
        and whom a rule allows; `Denied` to others.
        """
        return await self._request_change(codec.delete_topic(_name(topic)), "delete topic", topic)

    async def list_topics(self) -> list[str]:
        """Those that the caller created, or may produce to, subscribe to or delete."""
        answer = await self._ask(codec.list_topics())
        if answer.code != Code.OK:
            raise error_from_answer(answer, "list", "topics")
        found = codec.read_topics(answer.payload)
        return [name.decode("utf-8", "backslashreplace") for name in found]

    async def count_subscribers(self, topic: str) -> int:
        """How many read it, in all dialects."""
        answer = await self._ask(codec.count_subscribers(_name(topic)))
        if answer.code != Code.OK:
            raise error_from_answer(answer, "count the subscribers of", repr(topic))
        return codec.read_count(answer.payload)

    # --- producing

    async def produce(self, topic: str, body: Buffer) -> int | None:
        """Produce one message: its id, or None if nobody reads the topic (Nothing Happened)."""
        answer = await self._ask(codec.produce(_name(topic), body, self.options.max_frame_bytes))
        if answer.code == Code.OK:
            return codec.read_message_id(answer.payload)
        if answer.code == Code.NOTHING_HAPPENED:
            return None
        raise error_from_answer(answer, "produce to", repr(topic))

    async def produce_many(self, topic: str, bodies: Iterable[Buffer]) -> list[int | None]:
        """Produce many messages, in order, without waiting for each: the id of each, or None.

        If the bus refuses one, no more are sent and the refusal is raised; those on
        their way behind it may have been accepted, and a note says how many were. If
        `bodies` raises, or has one that is too large, those before it are produced.
        """
        if isinstance(bodies, bytes | bytearray | memoryview | str):
            raise TypeError("produce_many takes many bodies; for one there is produce")
        options = self.options
        producing = PipelinedProduce(
            self._require_connection(),
            _name(topic),
            options.max_frame_bytes,
            options.answer_timeout_s,
        )
        await producing.run(bodies)
        answers = producing.answers
        if answers.refused is not None:
            error = error_from_answer(answers.refused, "produce to", repr(topic))
            accepted = sum(one is not None for one in answers.ids)
            error.add_note(f"{accepted} messages of this call were accepted")
            raise error
        return answers.ids

    # --- subscribing

    async def subscribe(self, topic: str) -> Subscription:
        """Receive what is produced to a topic from now on; `DoesNotExist` if there is none.

        The subscription is a connection of its own (`quota_connections` counts it).
        Use it in `async with`, or call its `unsubscribe`.
        """
        self._require_connection()
        link, answer = await self._dial(codec.subscribe(_name(topic)))
        if answer.code != Code.OK:
            link.close()
            raise error_from_answer(answer, "subscribe to", repr(topic))
        return self._new_subscription(topic, codec.read_subscriber(answer.payload), link)

    # --- inside

    def _require_connection(self) -> FreudConnection:
        if self._link is None:
            raise UsageError("the client is not open: use it in a `with`, or call open()")
        if self._closed:
            raise NotConnected("the client is closed")
        if not self._link.is_up:
            raise self._link.make_loss_error()
        return self._link

    async def _ask(self, request: bytes) -> Answer:
        return await self._require_connection().ask(request, self.options.answer_timeout_s)

    async def _request_change(self, request: bytes, verb: str, topic: str) -> bool:
        answer = await self._ask(request)
        if answer.code in (Code.OK, Code.NOTHING_HAPPENED):
            return answer.code == Code.OK
        raise error_from_answer(answer, verb, repr(topic))

    async def _dial(self, first: bytes) -> tuple[FreudConnection, Answer]:
        """A new connection, and the answer to its first request: only then it counts."""
        timeout_s = self.options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                link = await dial(self.address, self.options.max_answer_bytes)
        except TimeoutError:
            raise NotConnected(f"{self.address} is too busy to accept a connection") from None
        try:
            return link, await link.ask(first, timeout_s)
        except ConnectionLost as error:
            raise NotConnected(f"cannot connect to {error}") from None
        except BaseException:
            link.abort()
            raise

    def _new_subscription(
        self, topic: str, subscriber: bytes, link: FreudConnection
    ) -> Subscription:
        def forget() -> None:
            self._subscriptions.pop(subscriber, None)

        inbox = SubscriptionInbox(topic, subscriber, link, self.options, self._wait_for_bus, forget)
        made = Subscription(topic, subscriber, inbox, self._unsubscribe)
        self._subscriptions[subscriber] = made
        return made

    async def _wait_for_bus(self) -> None:
        await self._ask(codec.unsubscribe(UNKNOWN_SUBSCRIBER))

    async def _unsubscribe(self, subscription: Subscription) -> None:
        """On its own connection, or, if a Get waits there, on ours."""
        link = subscription.inbox.idle_link or self._require_connection()
        request = codec.unsubscribe(subscription.id)
        answer = await link.ask(request, self.options.answer_timeout_s)
        if answer.code not in (Code.OK, Code.DOESNT_EXIST):
            raise error_from_answer(answer, "unsubscribe from", repr(subscription.topic))


def _name(topic: str) -> bytes:
    return topic_name.check_topic_name(topic)


def connect(
    address: str | Address | None = None,
    *,
    max_frame_bytes: int = DEFAULTS.max_frame_bytes,
    prefetch: int = DEFAULTS.prefetch,
    connect_timeout_s: float = DEFAULTS.connect_timeout_s,
    answer_timeout_s: float = DEFAULTS.answer_timeout_s,
) -> Client:
    """A client of the bus at `address` (unix:/path), to be used in a `with`.

    Without an address it is the bus of this user, or, if there is none, the
    machine's in /run/polybus. See `ClientOptions` for what each setting does.
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


# Requests are encoded in buffers of about this size: few writes, and early ones.
RUN_BYTES = 256 * KIB
# How many bodies of an iterable are looked at together.
GROUP = 4096


class PipelinedProduce:
    """One call's way through a link; `answers` has what came back."""

    def __init__(
        self, link: FreudConnection, name: bytes, max_frame_bytes: int, timeout_s: float
    ) -> None:
        self.answers = ProduceAnswers()
        self._link = link
        self._name = name
        self._max_frame_bytes = max_frame_bytes
        self._timeout_s = timeout_s

    async def run(self, bodies: Iterable[Buffer]) -> None:
        """Send until the end, or until one is refused; then wait for all that was sent."""
        items = iter(bodies)
        try:
            while group := list(itertools.islice(items, GROUP)):
                if not await self._send(group):
                    break
            await self.answers.wait_all(self._timeout_s)
        except TimeoutError:
            raise self._link.timeout_error(self._timeout_s) from None
        except ConnectionLost:
            if self.answers.refused is None:  # else it hung up because of that
                raise

    async def _send(self, group: Sequence[Buffer]) -> bool:
        place = 0
        while place < len(group) and self.answers.refused is None:
            data, after = encode_run(self._name, group, place, self._max_frame_bytes, RUN_BYTES)
            if after == place:
                raise self._too_large(group[place])
            async with asyncio.timeout(self._timeout_s):
                await self._link.wait_room()
            self.answers.expect(after - place)
            self._link.send(data, after - place, self.answers)
            place = after
        return self.answers.refused is None

    def _too_large(self, body: Buffer) -> TooLarge:
        most = codec.max_body(self._name, self._max_frame_bytes)
        return TooLarge(f"a body of {memoryview(body).nbytes} bytes: at most {most} fit")


# A Server Error's text is the name of the quota that was reached, and then nothing else.
_SETTING = re.compile(r"[a-z]+(_[a-z]+)+")


def error_from_answer(answer: Answer, request: str, subject: str) -> PolybusError:
    """The error for an answer; `request` and `subject` say to what, as in 'produce to' 'news'."""
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
