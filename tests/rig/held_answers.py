"""Answers that never arrive: requests that were done and not answered.

Between a commit and its answer there is less than a millisecond, and a kill at random hardly
ever falls there. So clients speak to the bus through a relay that holds answers back, and the
bus is killed once something can be seen that was done meanwhile.

    answers = HeldAnswers(relay, is_one_hidden)
    while not answers.hide_one():
        go_on()                         # no request was in progress
    bus.kill()
    answers.lose()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.rig.relay import Relay

# Clients without answers soon send no more requests, so waiting longer would be useless.
PATIENCE_S: Final = 1.0
LOOK_S: Final = 0.01


class HeldAnswers:
    """`is_one_hidden(since_ns)` is true if a later request is done and its answer is held."""

    def __init__(self, relay: Relay, is_one_hidden: Callable[[int], bool]) -> None:
        self._relay = relay
        self._is_one_hidden = is_one_hidden

    def hide_one(self) -> bool:
        """Hold answers until one is hidden. Releases them and returns False if none comes."""
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
        """Cut the connections, and discard the held answers with them."""
        self._relay.cut()
        self._relay.release()
