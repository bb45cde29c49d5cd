"""One batch at a time: drafted, sent, drafted again whenever another bus was faster.

Each batch ends with an entry in the bus's own diary, at the next expected sequence. After a
lost answer the diary's last entry names the batch that was done. A batch that is still in
flight cannot be done a second time, because the next batch expects the same sequence, and
the server accepts only one of the two.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

from polybus.errors import ConnectionLost, PolybusError, TooLarge
from tests.spikes.jetstream import subjects
from tests.spikes.jetstream.draft import Draft, Heads
from tests.spikes.jetstream.link import Link, Outrun, Oversized, Unanswered
from tests.spikes.jetstream.senses import Senses

T = TypeVar("T")

Done = tuple[T, dict[str, int]]  # the answer, and the sequence of each subject's last message


class Batches:
    def __init__(self, link: Link, senses: Senses) -> None:
        self.outrun = 0  # batches that another bus was faster than
        self._link = link
        self._senses = senses
        self._heads = Heads(link)
        self._diary = subjects.diary(uuid.uuid4().hex)

    def look(self, plan: Callable[[Draft], T]) -> T:
        """An answer that changes nothing is given from heads that were read now."""
        return plan(Draft(Heads(self._link), self._senses))

    def change(self, plan: Callable[[Draft], T]) -> T:
        return self.done(plan)[0]

    def done(self, plan: Callable[[Draft], T]) -> Done[T]:
        unanswered: dict[str, tuple[Draft, T]] = {}
        while True:
            draft = Draft(self._heads, self._senses)
            try:
                answer = plan(draft)
            except PolybusError:
                if draft.fresh:
                    raise
                draft.forget()
                continue
            if draft.messages:
                done = self._send(draft, answer, unanswered)
                if done is not None:
                    return done
            elif draft.fresh:
                return answer, {}
            draft.forget()

    def _send(
        self, draft: Draft, answer: T, unanswered: dict[str, tuple[Draft, T]]
    ) -> Done[T] | None:
        """None if it must be drafted again."""
        draft.head(self._diary)
        draft.set(self._diary, b"")
        name = uuid.uuid4().hex
        try:
            return answer, draft.sent(self._link.batch(name, draft.messages))
        except Oversized as error:
            raise TooLarge(str(error)) from error
        except Outrun:
            self.outrun += 1
        except Unanswered:
            unanswered[name] = draft, answer
        return self._landed(unanswered) if unanswered else None

    def _landed(self, unanswered: dict[str, tuple[Draft, T]]) -> Done[T] | None:
        try:
            self._link.connect()
            entry = self._link.last(self._diary)
        except OSError as error:
            raise ConnectionLost("it is not known whether this was done") from error
        name = "" if entry is None else entry.headers["Nats-Batch-Id"]
        if entry is None or name not in unanswered:
            return None
        draft, answer = unanswered[name]
        return answer, draft.sent(entry.sequence)
