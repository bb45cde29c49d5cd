"""What a producer has taken from its queue and has no outcome for, in the order of the queue.

The first ones are on their way: each has got its number when it was sent, and keeps it for
every further try. Behind a batch that was refused there may be others whose numbers were
used up with it (sending.py): those wait for new ones, like the halves of the refused one.

Such a half is *suspect*, and travels alone: nothing behind it must be sent twice because
of it. Else so many are on their way at once as the options allow.

Whoever calls holds the lock of the producer.
"""

from __future__ import annotations

from collections import deque

from polybus.errors import PeerError
from polybus.native.client.produce_queue import ProduceBatch


class InFlightBatches(deque[ProduceBatch]):
    def __init__(self, last_counter: int, max_in_flight: int) -> None:
        super().__init__()
        self._next = last_counter + 1
        self._max_in_flight = max_in_flight

    def sent_batches(self) -> list[ProduceBatch]:
        return [batch for batch in self if batch.counter]

    def first_unsent(self) -> ProduceBatch | None:
        """The first that waits for a new number."""
        return next((batch for batch in self if not batch.counter), None)

    def can_send(self, upcoming: ProduceBatch | None) -> bool:
        """May one more be sent: this one, or None for one that is still in the queue?"""
        on_their_way = self.sent_batches()
        if (upcoming and upcoming.is_suspect) or any(batch.is_suspect for batch in on_their_way):
            return not on_their_way
        return len(on_their_way) < self._max_in_flight

    def number(self, batch: ProduceBatch) -> None:
        """Before it is sent; one that has a number keeps it."""
        if not batch.counter:
            batch.counter = self._next
            self._next += 1

    def take_answered(self, counter: int) -> ProduceBatch:
        """Takes out the batch of this number. Answers come in order."""
        if not self or counter != self[0].counter:
            raise PeerError(f"an answer to {counter}, which was not asked")
        return self.popleft()

    def halve_first(self) -> None:
        self.extendleft(reversed(self.popleft().split()))
