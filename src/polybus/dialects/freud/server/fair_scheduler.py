"""How much a Freud connection may do before everybody else has had a turn.

A buffer of requests can be minutes of work: Lists over thousands of topics, Produces
to thousands of readers. So each connection has a *share*, in weights that stand for
about a microsecond each. When it is used up the connection rests, halted like one
whose Get waits, and stands in line for a new share. A turn of the event loop serves
the first in line alone: all who rest together take one share a turn, however many
they are.

A share is renewed when it is used up, and not with every buffer that comes: so nobody
has to know where a turn begins, and whoever asks for little rests for a moment now and
then. One request is never cut in two; it may be heavier than a share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Two milliseconds: others hardly notice, and the way round the loop is some 1 % of it.
TURN_WEIGHT = 2000
REQUEST_WEIGHT = 8  # whatever it is, and for each piece of the messages that a Get reads
READER_WEIGHT = 3  # that a message has to reach, or an answer to count
NAME_WEIGHT = 1  # that List has to judge
BYTES_PER_WEIGHT = 4096  # of messages read, for a weight of one
SPLIT_PER_WEIGHT = 32  # messages of a batch that is taken apart, for a weight of one
COMMIT_WEIGHT = 64  # a batch for the disk


class FairScheduler:
    """Those who rest, in the order in which they came; each is called once."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._resting: deque[Callable[[], None]] = deque()

    def join(self, go_on: Callable[[], None]) -> None:
        self._resting.append(go_on)
        if len(self._resting) == 1:
            self._call_soon(self._serve)

    def _serve(self) -> None:
        go_on = self._resting.popleft()
        if self._resting:
            self._call_soon(self._serve)
        go_on()
