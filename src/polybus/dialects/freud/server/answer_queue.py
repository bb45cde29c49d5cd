"""The way out of a Freud connection: answers in order, messages consumed when they are sent.

Answers are gathered while requests are carried out and written together. A
message counts as consumed when its whole answer is in the socket. If the socket
does not take all, what it has taken is confirmed at once, and the rest stays
with us: confirmed when the socket has taken it, given back if the connection
ends before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from polybus.dialects.freud.server.unread_queue import Range

if TYPE_CHECKING:
    from polybus.bus.connection import ConnectionIO
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.dialects.freud.server.pull_reader_table import PullReaders

ANSWER_HEADER = 8
RECORD_HEADER = 20


class WrittenMessages(NamedTuple):
    """Messages within the answers being written: where they start, and what frames each."""

    reader: PullReader
    taken: Range
    start: int
    frame: int


class AnswerQueue:
    def __init__(self, pipe: ConnectionIO, readers: PullReaders) -> None:
        self._pipe = pipe
        self._readers = readers
        self._parts: list[bytes] = []
        self._handed: list[WrittenMessages] = []
        self._discarding = False
        self.size = 0
        self.stalled = False
        self.sent_messages = self.sent_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        """What the client has not taken."""
        return self.size + (self._pipe.backlog_bytes() if self.stalled else 0)

    def add(self, answer: bytes) -> None:
        if self._discarding:
            return
        self._parts.append(answer)
        self.size += len(answer)

    def add_messages(
        self, answer: bytes, reader: PullReader, taken: Range, *, records: bool
    ) -> None:
        self._handed.append(WrittenMessages(reader, taken, self.size, _frame_bytes(records)))
        self.add(answer)

    def flush(self) -> None:
        """Writes what was gathered, and confirms what the socket has taken of it."""
        if not self._parts:
            return
        size = self.size
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self.size = 0
        self._pipe.write(data)
        self._confirm_written(size)

    def add_written(self, size: int, reader: PullReader, taken: Range, *, records: bool) -> None:
        """The short path has written an answer of this size, and the socket did not take it all."""
        self._handed.append(WrittenMessages(reader, taken, 0, _frame_bytes(records)))
        self._confirm_written(size)

    def _confirm_written(self, size: int) -> None:
        if self._pipe.has_failed():
            self._return_unsent()
        elif self.stalled:
            self._confirm_until(size - self._pipe.backlog_bytes())
        else:
            self._confirm_all()

    def on_drained(self) -> None:
        """The socket has taken everything."""
        self.stalled = False
        self._confirm_all()

    def discard(self) -> None:
        """The connection is gone: nothing is written any more."""
        self._discarding = True
        self.stalled = False
        self._parts = []
        self._return_unsent()

    def _return_unsent(self) -> None:
        """What did not reach the socket was not read."""
        handed, self._handed = self._handed, []
        self._readers.give_back((one.reader, one.taken) for one in handed)

    def _confirm_all(self) -> None:
        handed, self._handed = self._handed, []
        for reader, taken, _, _ in handed:
            self._confirm(reader, taken)

    def _confirm(self, reader: PullReader, taken: Range) -> None:
        self.sent_messages += len(taken)
        self.sent_bytes += taken.size
        self._readers.confirm(reader, taken)

    def _confirm_until(self, sent: int) -> None:
        handed, self._handed = self._handed, []
        for one in handed:
            reached = _count_complete(one, sent)
            if reached:
                done = Range(one.taken.chunk, one.taken.start, one.taken.start + reached)
                self._confirm(one.reader, done)
            if reached < len(one.taken):
                rest = Range(one.taken.chunk, one.taken.start + reached, one.taken.end)
                self._handed.append(WrittenMessages(one.reader, rest, one.start, one.frame))


def _count_complete(one: WrittenMessages, sent: int) -> int:
    """How many of these messages lie wholly within the first `sent` bytes."""
    bodies = 0
    for done, size in enumerate(one.taken.sizes()):
        bodies += size
        if one.start + (done + 1) * one.frame + bodies > sent:
            return done
    return len(one.taken)


def _frame_bytes(records: bool) -> int:
    return ANSWER_HEADER + (RECORD_HEADER if records else 0)
