"""What Gets are answered: messages of a subscription, plain or as records.

Gets come in groups of one subscription. A group takes what there is, in pieces: as many
messages as lie together make one answer, up to `STEP_BYTES`. Those of the group at the
head that have no answer yet are `left`; it may be that they wait (session.py), and that
one of them is answered alone meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.dialects.freud.codec import NOTICE_FLAG
from polybus.dialects.freud.server.answer_encoder import answers, messages, records
from polybus.dialects.freud.server.fair_scheduler import BYTES_PER_WEIGHT, REQUEST_WEIGHT

if TYPE_CHECKING:
    from polybus.dialects.freud.server.answer_queue import AnswerQueue
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.dialects.freud.server.request_scanner import Gets

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
