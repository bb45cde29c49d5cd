"""Requests of a client: HELLO's epoch, counted requests, and the journal around them.

A counted request (PUT, SUB, UNSUB) has three steps. After a kill between any two of them the
next start continues from the journal:

    1. it is in the journal, with its counter         else it was never sent
    2. it was sent and answered                       else it is sent again: the bus answers
                                                      the same counter with the same answer
    3. the answer is in the journal                   else as 2

At most one request is between 1 and 3: the next request first settles that one. GET has no
counter; its LAST says which messages were read. A client that ends sends a last GET for each
topic whose LAST the bus does not know, so that the bus can remove what was read.

A counted request ends with an `OK` or a refusal of FINAL_CODES. Those of STORED_CODES use up
the counter at the bus. Any other answer leaves its outcome unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client.client_keys import ClientKeys
from polybus.dialects.pirate.client.journal_state import (
    PUT,
    EpochOpened,
    JournalState,
    Outcome,
    Pending,
    PositionsDoubted,
    PositionsTrusted,
    RequestAnswered,
    RequestForgotten,
    describe_request,
    doubt_notice,
    opening_notices,
    restored_bus_notice,
    unknown_outcome_notice,
)
from polybus.dialects.pirate.client.pirate_options import ClientOptions
from polybus.dialects.pirate.client.request_channel import RequestChannel
from polybus.dialects.pirate.client.state_folder import ClientFolder, run_to_completion
from polybus.dialects.pirate.codec import ClientRequest, EmptyReply, ErrorReply, OkReply, Reply
from polybus.errors import (
    BadFrame,
    Conflict,
    Denied,
    DoesNotExist,
    Fenced,
    MalformedRequest,
    OutcomeUnknown,
    PeerError,
    PolybusError,
    Stale,
    TooLarge,
    Unavailable,
)


class Message(NamedTuple):
    """A delivered message. Ids of a topic start at 1; `timestamp_ns` is the commit time."""

    topic: str
    id: int
    timestamp_ns: int
    body: bytes


FINAL_CODES: Final = frozenset({codec.NO_TOPIC, codec.DENIED, codec.MALFORMED, codec.TOO_LARGE})
STORED_CODES: Final = frozenset({codec.NO_TOPIC})
ERRORS: Final[dict[str, type[PolybusError]]] = {
    codec.NO_TOPIC: DoesNotExist,
    codec.NOT_SUBSCRIBED: DoesNotExist,
    codec.FENCED: Fenced,
    codec.STALE: Stale,
    codec.MALFORMED: MalformedRequest,
    codec.TOO_LARGE: TooLarge,
    codec.DENIED: Denied,
    codec.BUSY: Unavailable,
}
FENCED_BY = (
    "another client with this id has started (the same --id, or a copy of this state folder),"
    " or the bus was restored from a backup; stop the other one, then start this one again"
)
STALE_BY = (
    "the bus has used its counter for another request: this state folder is an old copy, or"
    " another client has the same id; the outcome cannot be known; forget it"
)
EXPLANATIONS: Final = {codec.FENCED: FENCED_BY, codec.STALE: STALE_BY}


def error_from_refusal(reply: ErrorReply, what: str) -> PolybusError:
    """Return the error for a refusal. `what` describes the request."""
    kind = ERRORS.get(reply.code, PeerError)
    explanation = EXPLANATIONS.get(reply.code)
    text = f"{what}: {reply.code}: {reply.text}"
    return kind(f"{text} ({explanation})" if explanation else text)


class Fate(StrEnum):
    """The known fate of a forgotten request."""

    USED = "used"  # the bus has executed or refused it
    NEVER = "never"  # it was not executed, and no late copy can be
    UNKNOWN = "unknown"  # the bus has continued without this folder


class Requester:
    """One start of a client, from its HELLO to its end."""

    def __init__(
        self,
        folder: ClientFolder,
        server: str,
        options: ClientOptions,
        keys: ClientKeys | None,
        on_notice: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._options = options
        self._on_notice = on_notice
        self._counted_channel = RequestChannel(server, options, keys)
        self._read_channel = RequestChannel(server, options, keys)
        # At most one counted request is unsettled. GETs have their own lock and channel, so that
        # reading continues while a request waits for its answer.
        self._count_turn, self._read_turn = asyncio.Lock(), asyncio.Lock()
        self._fenced: Fenced | None = None
        # Recorded for a reader that was cancelled before delivery, by topic.
        self._undelivered: dict[str, Message] = {}
        self._unsent_lasts: dict[str, int] = {}  # recorded since the last GET of the topic

    @property
    def state(self) -> JournalState:
        return self._folder.state

    async def open(self) -> None:
        """Open a new epoch with HELLO. Fences any earlier client with this id."""
        await self._hello()
        if self._options.reread and self.state.doubted:
            await run_to_completion(self._folder.record, PositionsTrusted())
        if self.state.pending is not None:
            self._on_notice(unknown_outcome_notice(self.state.pending))

    async def execute(self, op: bytes, topic: str, body: bytes = b"") -> int:
        """Execute a counted request once. Returns its value, or raises its refusal."""
        async with self._count_turn:
            left = await self._settle_pending()
            if left is not None:
                ended = f"refused: {left.error}" if left.error else f"executed: {left.value}"
                self._on_notice(
                    f"{left.op} {left.topic!r} (counter {left.counter}) was {ended};"
                    " it was pending from an earlier call"
                )
            # LAST before the await: other tasks may read in the meantime.
            last = self.state.lasts.get(topic, 0)
            request = await run_to_completion(self._folder.record_request, op.decode(), topic, body)
            value = await self._send_counted(request)
            if op == codec.UNSUB:
                self._undelivered.pop(topic, None)
            if op == codec.PUT and value <= last and topic not in self.state.doubted:
                await self._report_restored_bus(
                    f"it returned the id {value}, and {last} was already read"
                )
            return value

    async def resume(self) -> Outcome | None:
        """Send the pending request again. Returns its outcome, or None without one."""
        async with self._count_turn:
            return await self._settle_pending()

    async def forget(self) -> Fate | None:
        """Abandon the pending request, after a new epoch, which fences copies in flight."""
        async with self._count_turn, self._read_turn:
            self._check_fenced()
            request = self.state.pending
            if request is None:
                return None
            opened = await self._hello()
            await run_to_completion(self._folder.settle, RequestForgotten(request.counter))
            if opened.highest == request.counter:
                return Fate.USED
            return Fate.NEVER if opened.highest < request.counter else Fate.UNKNOWN

    async def fetch(self, topic: str, record: bool) -> Message | None:
        """Return the first message above LAST. With `record`, LAST is stored before that."""
        async with self._read_turn:
            self._check_fenced()
            if topic in self.state.doubted:
                raise Conflict(doubt_notice(topic))
            if topic in self._undelivered:
                return self._undelivered.pop(topic)
            message = await self._get(topic, self.state.lasts.get(topic, 0))
            if message is None:
                return None
            if record:
                try:
                    await self.record(message)
                except asyncio.CancelledError:
                    # Recorded all the same: the next call returns it, so that it is not lost.
                    if self.state.lasts.get(topic, 0) >= message.id:
                        self._undelivered[message.topic] = message
                    raise
            return message

    async def record(self, message: Message) -> None:
        self._unsent_lasts[message.topic] = message.id
        await run_to_completion(self._folder.record_read, message.topic, message.id)

    async def send_lasts(self) -> None:
        """Send each LAST that no GET has carried, as far as the bus answers."""
        for topic in list(self._unsent_lasts):
            last = self.state.lasts.get(topic)
            if last is None or topic in self.state.doubted:
                continue
            with contextlib.suppress(PolybusError):  # the next GET of this folder sends it
                async with self._read_turn:
                    self._check_fenced()
                    await self._get(topic, last)  # the message that it returns stays unread

    def close(self) -> None:
        self._counted_channel.close()
        self._read_channel.close()

    # --- HELLO

    async def _hello(self) -> EpochOpened:
        # One number for all tries, so that a late copy gets the same epoch and fences no client.
        number = int.from_bytes(os.urandom(8))
        reply = await self._exchange(
            self._counted_channel, ClientRequest(codec.HELLO, self.state.id, 0, number), "HELLO"
        )
        if not isinstance(reply, OkReply):
            raise _error_from_reply(reply, "HELLO")
        opened = EpochOpened(reply.first, reply.second)
        for line in opening_notices(self.state, opened):
            self._on_notice(line)
        await run_to_completion(self._folder.record, opened)
        return opened

    # --- counted requests

    async def _settle_pending(self) -> Outcome | None:
        """Settle the pending request of an earlier call."""
        self._check_fenced()
        request = self.state.pending
        if request is None:
            return None
        try:
            await self._send_counted(request)
        except PolybusError:
            if self.state.pending is not None:
                raise
        return self.state.outcome

    async def _send_counted(self, request: Pending) -> int:
        """Send a recorded request, record its answer, and return the value or raise the refusal.

        Raises `OutcomeUnknown` if there is no answer. The request then stays pending.
        """
        counter, op, topic, body = request
        frames = codec.split_body(body) if op == PUT else ()
        asked = ClientRequest(op.encode(), self.state.id, self.state.epoch, counter, topic, frames)
        what = describe_request(request)
        try:
            reply = await self._exchange(self._counted_channel, asked, what)
            if not isinstance(reply, OkReply | ErrorReply):
                raise BadFrame("unexpected_reply")
            if isinstance(reply, OkReply) and reply.first != counter:
                raise BadFrame("unexpected_reply")
        except Fenced:
            raise
        except PolybusError as error:
            raise OutcomeUnknown(f"{error}; {unknown_outcome_notice(request)}") from error
        if isinstance(reply, ErrorReply) and reply.code == codec.BUSY:
            text = f"the bus is busy: {reply.text}; {unknown_outcome_notice(request)}"
            raise OutcomeUnknown(text)
        if isinstance(reply, OkReply):
            answer = RequestAnswered(counter, reply.second, "", True)
            await run_to_completion(self._folder.settle, answer)
            return reply.second
        if reply.code in FINAL_CODES:
            answer = RequestAnswered(counter, None, reply.code, reply.code in STORED_CODES)
            await run_to_completion(self._folder.settle, answer)
        raise error_from_refusal(reply, what)

    # --- GET

    async def _get(self, topic: str, last: int) -> Message | None:
        asked = ClientRequest(codec.GET, self.state.id, self.state.epoch, 0, topic, (), last)
        reply = await self._exchange(self._read_channel, asked, f"GET {topic!r}")
        if not isinstance(reply, ErrorReply) and self._unsent_lasts.get(topic, 0) <= last:
            self._unsent_lasts.pop(topic, None)
        if isinstance(reply, EmptyReply):
            return None
        if isinstance(reply, codec.MessageReply):
            if reply.id <= last:
                raise BadFrame("old_message")
            return Message(topic, *reply)
        if isinstance(reply, ErrorReply) and reply.code == codec.MALFORMED and last:
            await self._report_restored_bus(
                f"{topic!r} was read up to {last}, and the bus has no such id"
            )
            raise Conflict(doubt_notice(topic))
        raise _error_from_reply(reply, f"GET {topic!r}")

    async def _report_restored_bus(self, how: str) -> None:
        self._on_notice(restored_bus_notice(self.state, how))
        await run_to_completion(self._folder.record, PositionsDoubted())

    # --- exchange

    async def _exchange(self, channel: RequestChannel, request: ClientRequest, what: str) -> Reply:
        """Send a request and return the reply. BUSY is retried as often as a timeout."""
        frames = codec.encode_request(request)
        size = sum(map(len, request.body))
        for attempt in itertools.count(1):
            reply = codec.decode_reply(await channel.ask(frames, size))
            if isinstance(reply, ErrorReply) and reply.code == codec.FENCED:
                self._fenced = Fenced(str(error_from_refusal(reply, what)))
                raise self._fenced
            busy = isinstance(reply, ErrorReply) and reply.code == codec.BUSY
            if not busy or attempt == self._options.tries:
                return reply
            await asyncio.sleep(random.uniform(0.5, 1.0) * self._options.jitter_s * attempt)
        raise AssertionError  # unreachable: count() never ends

    def _check_fenced(self) -> None:
        if self._fenced is not None:
            raise self._fenced


def _error_from_reply(reply: Reply, what: str) -> PolybusError:
    if isinstance(reply, ErrorReply):
        return error_from_refusal(reply, what)
    return BadFrame("unexpected_reply")
