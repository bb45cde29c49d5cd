"""One connection of a client to Freud's socket, from connecting to its end.

`send` writes requests and registers the receiver of their answers. Answers do not name
their request: they arrive in the order of the requests, and `buffer_updated` passes them to
the receivers in that order. A caller that was cancelled keeps its place in the queue; its
answers are discarded. The number of unanswered requests is bounded: a sender must await
`wait_room` first. A connection is never reopened; when it ends, every receiver gets the
error that ended it.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Protocol

from polybus.clients import client_connection
from polybus.dialects.freud.client.answer_batch import Answer, AnswerBatch, scan_answers
from polybus.dialects.freud.codec import Code
from polybus.errors import AddressError, BadFrame, Denied, NotConnected, PolybusError
from polybus.model.address import Address
from polybus.model.limits import KIB


class AnswerReceiver(Protocol):
    """Receives answers, in one or several pieces, or the error if none will arrive."""

    def on_answers(self, batch: AnswerBatch, start: int, end: int) -> None: ...
    def fail(self, error: PolybusError) -> None: ...


class SingleAnswer:
    """Receives the answer to one request."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_answers(self, batch: AnswerBatch, start: int, end: int) -> None:
        if not self.answered.done():
            self.answered.set_result(batch[start])

    def fail(self, error: PolybusError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
            self.answered.exception()  # a cancelled caller must not cause a log line


class ProduceAnswers:
    """Receives the answers to many Produces: ids, and None where there was no subscriber."""

    def __init__(self) -> None:
        self.ids: list[int | None] = []
        self.refused: Answer | None = None  # the first refusal
        self.error: PolybusError | None = None
        self._unanswered = 0
        self._progress = asyncio.Event()

    def expect(self, count: int) -> None:
        self._unanswered += count

    def on_answers(self, batch: AnswerBatch, start: int, end: int) -> None:
        self._unanswered -= end - start
        self._progress.set()
        while start < end:
            after = batch.run_end(start, end)
            code = batch.code(start)
            if code == Code.OK:
                self.ids += batch.message_ids(start, after)
            elif code == Code.NOTHING_HAPPENED:
                self.ids += [None] * (after - start)
            elif self.refused is None:
                self.refused = batch[start]
            start = after

    def fail(self, error: PolybusError) -> None:
        self.error = error
        self._progress.set()

    async def wait_all(self, timeout_s: float) -> None:
        """Wait for every answer. Raises TimeoutError if none arrives for `timeout_s`."""
        while self._unanswered and self.error is None:
            self._progress.clear()
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        if self.error is not None and self.refused is None:  # a refusal is more specific
            raise self.error


# Enough for a connection that mostly waits: a program may have a thousand of them.
FIRST_BUFFER_BYTES = 8 * KIB
# Size after the first buffer was full once: larger system calls gain nothing. Only a
# larger answer makes the buffer grow further, until it was read.
READ_BUFFER_BYTES = 256 * KIB
# Senders wait at this many unanswered requests: far more than a round trip needs.
MAX_EXPECTED = 65_536
# Delay before connecting again while the bus's backlog of connections is full.
BACKLOG_RETRY_S = 0.01

CLOSED_BY_BUS = (
    "the bus closed the connection: it stopped, or quota_connections or max_frame_bytes was"
    " reached, or answers were not read (its log says which); a restart loses topics,"
    " subscriptions and unread messages"
)


class FreudConnection(client_connection.ClientConnection):
    """Writes requests, and passes their answers to receivers in the order of the requests."""

    closed_by_peer = CLOSED_BY_BUS

    def __init__(self, address: Address, max_answer_bytes: int) -> None:
        super().__init__(address)
        self._max_answer_bytes = max_answer_bytes
        self._buffer = bytearray(FIRST_BUFFER_BYTES)
        self._filled = 0
        self._queue: deque[AnswerReceiver] = deque()
        self._counts: deque[int] = deque()  # how many answers each receiver in the queue expects
        self._unanswered = 0  # sum of the counts
        self._writable = True
        self._room = asyncio.Event()
        self._room.set()

    # --- called by the client

    async def ask(self, request: bytes, timeout_s: float) -> Answer:
        """Send one request and return its answer. Raises NotConnected if none arrives in time."""
        expecting = SingleAnswer()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_room()
                self.send(request, 1, expecting)
                return await expecting.answered
        except TimeoutError:
            raise self.timeout_error(timeout_s) from None

    async def wait_room(self) -> None:
        """Wait until more may be sent. Raises ConnectionLost if the connection ends first."""
        # A loop: between `set` and this task's turn another sender may have taken the room.
        while not self._room.is_set():
            await self._room.wait()
        if not self.is_up:
            raise self.make_loss_error()

    def send(self, requests: bytes, count: int, expecting: AnswerReceiver) -> None:
        """Write `count` requests and register their receiver. The connection must be up."""
        assert self._transport is not None
        self._queue.append(expecting)
        self._counts.append(count)
        self._unanswered += count
        self._transport.write(requests)
        self._regulate()

    def finish(self) -> None:
        """Send no more. The bus answers all requests, then closes the connection."""
        self._closing = True
        if self._transport is not None and self.is_up:
            self._transport.write_eof()

    def timeout_error(self, timeout_s: float) -> NotConnected:
        """Return the error for a request without an answer in time."""
        return NotConnected(f"no answer from {self.address} within {timeout_s:g} s")

    # --- called by the event loop

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        end = self._filled + nbytes
        consumed, batch, too_large = scan_answers(self._buffer, 0, end, self._max_answer_bytes)
        rest, size = end - consumed, len(self._buffer)
        if rest == size:
            size *= 2  # one answer is larger than the whole buffer
        elif end == size < READ_BUFFER_BYTES:
            size = READ_BUFFER_BYTES  # it was full, so there is probably more
        elif size > READ_BUFFER_BYTES and 2 * rest <= READ_BUFFER_BYTES:
            size = READ_BUFFER_BYTES
        if size != len(self._buffer):
            self._buffer = self._buffer[consumed:end] + bytes(size - rest)
        elif consumed and rest:
            self._buffer[:rest] = self._buffer[consumed:end]
        self._filled = rest
        self._dispatch(batch)
        if too_large:
            self.abort_with(BadFrame("too_large"))

    def pause_writing(self) -> None:
        self._writable = False
        self._regulate()

    def resume_writing(self) -> None:
        self._writable = True
        self._regulate()

    def on_ended(self) -> None:
        self._room.set()
        self._counts.clear()
        while self._queue:
            self._queue.popleft().fail(self.make_loss_error())

    def _dispatch(self, batch: AnswerBatch) -> None:
        at, count = 0, len(batch)
        while at < count and self.error is None:
            if not self._queue:
                self.abort_with(BadFrame("unasked_answer"))
                return
            receiver = self._queue[0]
            taken = min(self._counts[0], count - at)
            self._counts[0] -= taken
            self._unanswered -= taken
            if not self._counts[0]:
                self._queue.popleft()
                self._counts.popleft()
            try:
                receiver.on_answers(batch, at, at + taken)
            except (BadFrame, ValueError) as error:  # ValueError: an Ok's payload is malformed
                self.abort_with(error if isinstance(error, BadFrame) else BadFrame("payload"))
                # It may have left the queue, and `on_ended` fails only queued receivers.
                receiver.fail(self.make_loss_error())
            at += taken
        self._regulate()

    def _regulate(self) -> None:
        if self._writable and self._unanswered < MAX_EXPECTED:
            self._room.set()
        elif self.is_up:
            self._room.clear()


async def dial(address: Address, max_answer_bytes: int) -> FreudConnection:
    """Connect to Freud's socket. Raises NotConnected if no bus listens there."""
    if address.scheme != "unix":
        raise AddressError(f"freud address must be unix:PATH, got {address}")
    connection = FreudConnection(address, max_answer_bytes)
    try:
        sock = await _connect_socket(address.path)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=sock)
    except PermissionError:
        raise Denied(f"access to {address} denied for this user") from None
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        raise NotConnected(f"no bus answers at {address}: start one with 'polybus serve'") from None
    except OSError as error:
        raise NotConnected(f"cannot connect to {address}: {error.strerror or error}") from None
    return connection


async def _connect_socket(path: str) -> socket.socket:
    """Connect without blocking: a Unix socket connects at once unless the backlog is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                await asyncio.sleep(BACKLOG_RETRY_S)
    except BaseException:
        sock.close()
        raise
