"""The way out of a Freud connection: answers in order, messages consumed when they are sent.

Answers are gathered while requests are carried out and written together. A
message counts as consumed when its whole answer is in the socket. If the socket
does not take all, what it has taken is confirmed at once, and the rest stays
with us: confirmed when the socket has taken it, given back if the connection
ends before.


What Gets are answered: messages of a subscription, plain or as records.

Gets come in groups of one subscription. A group takes what there is, in pieces: as many
messages as lie together make one answer, up to `STEP_BYTES`. Those of the group at the
head that have no answer yet are `left`; it may be that they wait (session.py), and that
one of them is answered alone meanwhile.

Reply slots: Produces that are on their way to the disk, in the order they were asked for.

A commit takes a disk's time, and the next Produce need not wait for it: it gets a
slot behind the first. Slots are filled in whatever order commits end, and answered
from the head on, so answers keep the order of the requests. Everything but a Produce
to a durable topic waits until all slots are answered: a Get behind a Produce finds
what was produced. What all slots of a connection hold is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.bus.request_outcome import RequestOutcome
from polybus.dialects.freud.codec import NOTICE_FLAG
from polybus.dialects.freud.server.answer_encoder import answers, messages, records
from polybus.dialects.freud.server.fair_scheduler import BYTES_PER_WEIGHT, REQUEST_WEIGHT
from polybus.dialects.freud.server.unread_queue import Range

if TYPE_CHECKING:
    from polybus.bus.connection import ConnectionIO
    from polybus.dialects.freud.server.pull_reader import PullReader, PullReaders
    from polybus.dialects.freud.server.request_scanner import Gets

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


# Answers are written when this much has been gathered: far fewer writes than requests.
STEP_BYTES = 128 * 1024


class GetGroup:
    """`left` is None until the group at the head was begun."""

    def __init__(self, gathered: AnswerQueue) -> None:
        self._answers = gathered
        self.unanswered: int | None = None

    def answer_messages(self, group: Gets, reader: PullReader, most: int | None = None) -> int:
        """Answers with what comes next; what that weighed (turns.py), 0 if there is nothing."""
        assert self.unanswered is not None
        taken = reader.take(most or self.unanswered, STEP_BYTES)
        if taken is None:
            return 0
        chunk, count = taken.chunk, len(taken)
        if group.records:
            data = records(
                chunk.first_id,
                chunk.times,
                NOTICE_FLAG if chunk.notice else 0,
                chunk.offsets,
                chunk.bodies,
                taken.start,
                count,
            )
        else:
            data = messages(chunk.offsets, chunk.bodies, taken.start, count)
        self._answers.add_messages(data, reader, taken, records=group.records)
        self.unanswered -= count
        if chunk.notice:
            self._answers.flush()  # once it is sent, the id is gone
        return REQUEST_WEIGHT + len(data) // BYTES_PER_WEIGHT

    def answer_all(self, code: int) -> bool:
        """All that are left: the group is done."""
        assert self.unanswered is not None
        self._answers.add(answers(code, self.unanswered))
        self.unanswered = 0
        return True

    def answer_one(self, code: int) -> None:
        assert self.unanswered is not None
        self._answers.add(answers(code, 1))
        self.unanswered -= 1


MESSAGE_BYTES = 16  # what a message holds beside its body, here and in its answer


class ProduceSlot:
    __slots__ = ("first_id", "group", "outcome", "size")

    def __init__(self, group: Any, outcome: RequestOutcome | None = None) -> None:
        self.group = group
        self.size = group_bytes(group)
        self.outcome = outcome
        self.first_id = 0


class ProduceSlots:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._slots: deque[ProduceSlot] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def has_room_for(self, group: Any) -> bool:
        """One always fits: it was read already."""
        return not self._slots or self._bytes + group_bytes(group) <= self._max_bytes

    def add(self, slot: ProduceSlot) -> None:
        self._slots.append(slot)
        self._bytes += slot.size

    def take_filled(self) -> Iterator[ProduceSlot]:
        """Those at the head whose outcome is known; they are no longer here."""
        while self._slots and self._slots[0].outcome is not None:
            slot = self._slots.popleft()
            self._bytes -= slot.size
            yield slot

    def clear(self) -> None:
        self._slots.clear()
        self._bytes = 0


def group_bytes(group: Any) -> int:
    return len(group.bodies) + MESSAGE_BYTES * int(group.count)
