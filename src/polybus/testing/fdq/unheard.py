"""Answers that never come: what was done, and nobody was told.

Between the commit of a transaction and its answer there is less than a millisecond, and a
kill at random hardly ever falls there. So clients speak to the bus through a relay that holds
answers back, and the bus is killed once a transaction can be seen that was done meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from polybus.testing.fdq.diary import UNKNOWN, Operation
from polybus.testing.fdq.history import COMMIT

if TYPE_CHECKING:
    from polybus.testing.relay import Relay

# Clients whose answers stay out have soon done all that they had in hand: then it is in vain.
PATIENCE_S = 1.0
LOOK_S = 0.01


class HeldAnswers:
    """None of them reaches anybody; what was held back is lost, unless they are let go.

    `operations` are those of all clients so far, `outputs` what their transactions produced.
    """

    def __init__(
        self,
        relay: Relay,
        operations: Callable[[], Iterable[Operation]],
        outputs: Callable[[], Iterable[str]],
    ) -> None:
        self._relay = relay
        self._operations = operations
        self._outputs = outputs

    def hide_a_transaction(self) -> bool:
        """Holds answers back until there is one: if nobody was about to, they are let go."""
        since_ns = time.monotonic_ns()
        self._relay.hold_answers()
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            if self._is_one_hidden(since_ns):
                return True
            time.sleep(LOOK_S)
        self._relay.release()
        return False

    def lose(self) -> None:
        self._relay.cut()
        self._relay.release()

    def _is_one_hidden(self, since_ns: int) -> bool:
        begun = [
            one
            for one in self._operations()
            if one.kind == COMMIT and one.outcome == UNKNOWN and one.began_ns > since_ns
        ]
        done = set(self._outputs()) if begun else set()
        return any(done.issuperset(one.fields["outputs"]) for one in begun)
