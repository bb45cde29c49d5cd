"""Answers of a Freud connection: in the order of the requests, consumed when they are sent.

`AnswerQueue` gathers answers while requests are executed and writes them together. A
message counts as consumed when its whole answer is in the socket. If the socket accepts
only a part, the messages in that part are confirmed at once; the others are confirmed when
the socket has drained, or given back if the connection ends before.

`GetGroup` answers a run of Gets of one subscription. Adjacent messages make one piece of
up to STEP_BYTES.

`ProduceSlots` keeps the order of Produces that wait for their commit. A later Produce need
not wait for an earlier commit: it gets the next slot. Commits fill slots in any order, and
slots are answered from the head. Every request other than a durable Produce waits until
all slots are answered, so that a Get after a Produce finds the message. The bytes of all
slots of a connection are bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.bus.request_outcome import RequestOutcome
from polybus.dialects.freud.codec import BODY_PREFIX, NOTICE_FLAG, Code
from polybus.dialects.freud.server.answer_encoder import (
    encode_answers,
    encode_messages,
    encode_records,
)
from polybus.dialects.freud.server.fair_scheduler import BYTES_PER_WEIGHT, REQUEST_WEIGHT
from polybus.dialects.freud.server.unread_queue import Range

if TYPE_CHECKING:
    from polybus.bus.connection import ConnectionIO
    from polybus.dialects.freud.server.pull_reader import PullReader, PullReaders
    from polybus.dialects.freud.server.request_scanner import GetRun

ANSWER_HEADER = 8
RECORD_HEADER = 20


class WrittenMessages(NamedTuple):
    """Messages within written answers: their offset, and the header bytes of each."""

    reader: PullReader
    taken: Range
    start: int
    header_bytes: int


class AnswerQueue:
    def __init__(self, pipe: ConnectionIO, readers: PullReaders) -> None:
        self._pipe = pipe
        self._readers = readers
        self._parts: list[bytes] = []
        self._unconfirmed: list[WrittenMessages] = []
        self._discarding = False
        self.size = 0
        self.stalled = False
        self.sent_messages = self.sent_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not read."""
        return self.size + (self._pipe.backlog_bytes() if self.stalled else 0)

    def add(self, answer: bytes) -> None:
        if self._discarding:
            return
        self._parts.append(answer)
        self.size += len(answer)

    def add_messages(
        self, answer: bytes, reader: PullReader, taken: Range, header_bytes: int
    ) -> None:
        self._unconfirmed.append(WrittenMessages(reader, taken, self.size, header_bytes))
        self.add(answer)

    def flush(self) -> None:
        """Write the gathered answers, and confirm the messages that the socket accepted."""
        if not self._parts:
            return
        size = self.size
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self.size = 0
        self._pipe.write(data)
        self._confirm_written(size)

    def add_written(self, size: int, reader: PullReader, taken: Range, *, records: bool) -> None:
        """Register an answer that the fast path wrote and the socket did not accept whole."""
        header_bytes = ANSWER_HEADER + (RECORD_HEADER if records else 0)
        self._unconfirmed.append(WrittenMessages(reader, taken, 0, header_bytes))
        self._confirm_written(size)

    def _confirm_written(self, size: int) -> None:
        if self._pipe.has_failed():
            self._return_unsent()
        elif self.stalled:
            self._confirm_until(size - self._pipe.backlog_bytes())
        else:
            self._confirm_all()

    def on_drained(self) -> None:
        """Confirm all messages: the socket accepted everything."""
        self.stalled = False
        self._confirm_all()

    def discard(self) -> None:
        """Discard all answers, present and later ones: the connection has ended."""
        self._discarding = True
        self.stalled = False
        self._parts = []
        self._return_unsent()

    def _return_unsent(self) -> None:
        """Give back the messages that did not reach the socket."""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        self._readers.give_back((written.reader, written.taken) for written in unconfirmed)

    def _confirm_all(self) -> None:
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for reader, taken, _, _ in unconfirmed:
            self._confirm(reader, taken)

    def _confirm(self, reader: PullReader, taken: Range) -> None:
        self.sent_messages += len(taken)
        self.sent_bytes += taken.size
        self._readers.confirm(reader, taken)

    def _confirm_until(self, sent: int) -> None:
        """Confirm the messages that lie wholly within the first `sent` bytes."""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for written in unconfirmed:
            reader, taken, end, header_bytes = written
            sent_end = taken.start
            for size in taken.sizes():
                end += header_bytes + size
                if end > sent:
                    break
                sent_end += 1
            if sent_end > taken.start:
                self._confirm(reader, Range(taken.chunk, taken.start, sent_end))
            if sent_end < taken.end:
                rest = Range(taken.chunk, sent_end, taken.end)
                self._unconfirmed.append(WrittenMessages(reader, rest, written.start, header_bytes))


# Answers are written once this many bytes are gathered: far fewer writes than requests.
STEP_BYTES = 128 * 1024


class GetGroup:
    """The run of Gets at the head. `unanswered` is None before its first Get is executed."""

    def __init__(self, queue: AnswerQueue) -> None:
        self._answers = queue
        self.unanswered: int | None = None

    def answer_messages(self, group: GetRun, reader: PullReader, most: int | None = None) -> int:
        """Answer with the next messages. Returns the weight of that, 0 if there is none."""
        assert self.unanswered is not None
        taken = reader.take(most or self.unanswered, STEP_BYTES, bare=not group.records)
        if taken is None:
            return 0
        chunk, count = taken.chunk, len(taken)
        header_bytes = ANSWER_HEADER
        if group.records:
            header_bytes += RECORD_HEADER
            data = encode_records(
                chunk.first_id,
                chunk.times,
                NOTICE_FLAG if chunk.notice else 0,
                chunk.offsets,
                chunk.bodies,
                taken.start,
                count,
            )
        elif taken.needs_escape:
            header_bytes += len(BODY_PREFIX)
            body = chunk.bodies[chunk.offsets[taken.start] : chunk.offsets[taken.end]]
            data = encode_answers(Code.OK, 1, BODY_PREFIX + body)
        else:
            data = encode_messages(chunk.offsets, chunk.bodies, taken.start, count)
        self._answers.add_messages(data, reader, taken, header_bytes)
        self.unanswered -= count
        if chunk.notice:
            self._answers.flush()  # sending the notice ends the subscription, so send it now
        return REQUEST_WEIGHT + len(data) // BYTES_PER_WEIGHT

    def answer_all(self, code: int) -> bool:
        """Answer all that are left with one code. Returns True: the run is done."""
        assert self.unanswered is not None
        self._answers.add(encode_answers(code, self.unanswered))
        self.unanswered = 0
        return True

    def answer_one(self, code: int) -> None:
        assert self.unanswered is not None
        self._answers.add(encode_answers(code, 1))
        self.unanswered -= 1


MESSAGE_BYTES = 16  # memory of a message beside its body, here and in its answer


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
        """Return True if the run fits. One run always does: its bytes are in memory anyway."""
        return not self._slots or self._bytes + group_bytes(group) <= self._max_bytes

    def add(self, slot: ProduceSlot) -> None:
        self._slots.append(slot)
        self._bytes += slot.size

    def take_filled(self) -> Iterator[ProduceSlot]:
        """Remove and yield the slots at the head whose outcome is known."""
        while self._slots and self._slots[0].outcome is not None:
            slot = self._slots.popleft()
            self._bytes -= slot.size
            yield slot

    def clear(self) -> None:
        self._slots.clear()
        self._bytes = 0


def group_bytes(group: Any) -> int:
    return len(group.bodies) + MESSAGE_BYTES * int(group.count)
