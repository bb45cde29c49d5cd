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
from polybus.dialects.freud.server.fair_scheduler import BYTES, REQUEST

if TYPE_CHECKING:
    from polybus.dialects.freud.server.answer_queue import Answers
    from polybus.dialects.freud.server.pull_reader import Reader
    from polybus.dialects.freud.server.request_scanner import Gets

# Answers are written when this much has been gathered: far fewer writes than requests.
STEP_BYTES = 128 * 1024


class Getting:
    """`left` is None until the group at the head was begun."""

    def __init__(self, gathered: Answers) -> None:
        self._answers = gathered
        self.left: int | None = None

    def take(self, group: Gets, reader: Reader, most: int | None = None) -> int:
        """Answers with what comes next; what that weighed (turns.py), 0 if there is nothing."""
        assert self.left is not None
        taken = reader.take(most or self.left, STEP_BYTES)
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
        self.left -= count
        if chunk.notice:
            self._answers.flush()  # once it is sent, the id is gone
        return REQUEST + len(data) // BYTES

    def answer_all(self, code: int) -> bool:
        """All that are left: the group is done."""
        assert self.left is not None
        self._answers.add(answers(code, self.left))
        self.left = 0
        return True

    def answer_one(self, code: int) -> None:
        assert self.left is not None
        self._answers.add(answers(code, 1))
        self.left -= 1
