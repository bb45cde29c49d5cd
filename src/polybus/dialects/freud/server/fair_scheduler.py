"""Turns of Freud connections: how much one may execute before the others are served.

One buffer of requests can be minutes of work: Lists over thousands of topics, Produces to
thousands of readers. So each connection has a share of TURN_WEIGHT, in units of about a
microsecond. When it is used up, the connection rests: it is halted, and queues for a new
share. One turn of the event loop serves only the first connection in the queue, so all
resting connections together use one share per turn.

A share is renewed when it is used up, not with every received buffer, so no session needs
to know where a turn of the loop begins; a light client rests briefly now and then. A single
request is never split and may weigh more than a share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Two milliseconds: a small delay for others, and a turn of the loop is about 1 % of it.
TURN_WEIGHT = 2000
REQUEST_WEIGHT = 8  # each run of requests that Python executes
PLAIN_WEIGHT = 1  # each run of plain Produces, and each piece of messages that Gets read
READER_WEIGHT = 3  # each reader that a message must reach or an answer must count
NAME_WEIGHT = 1  # each name that a List must check
BYTES_PER_WEIGHT = 4096  # bytes of messages read per unit
SPLIT_PER_WEIGHT = 32  # messages of a split batch per unit
COMMIT_WEIGHT = 64  # each batch of a durable topic


class FairScheduler:
    """A queue of resting connections; each is resumed once, in order of arrival."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._resting: deque[Callable[[], None]] = deque()

    def join(self, resume: Callable[[], None]) -> None:
        self._resting.append(resume)
        if len(self._resting) == 1:
            self._call_soon(self._serve)

    def _serve(self) -> None:
        resume = self._resting.popleft()
        if self._resting:
            self._call_soon(self._serve)
        resume()
