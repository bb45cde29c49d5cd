"""Kill a process that passes a named point of pirate's client, at the n-th passing.

The points are calls of `passing` that a patch adds to a copy of the client:

    torn        half of a record is in the journal
    written     all of it is, and it is not synced
    kept        the record is on disk, and the state in memory is not changed
    rewritten   a shorter journal is written next to the old one
    renamed     it has replaced the old one, and the folder is not synced
    asked       a request is in the journal, and was not sent
    answered    its answer has arrived, and is not in the journal
    settled     the answer is in the journal, and the caller does not have it
    fetched     a message has arrived, and its LAST is not in the journal
    recorded    its LAST is in the journal
"""

from __future__ import annotations

import os
import signal
from typing import Final

ORDER: Final = "POLYBUS_KILL"
POINTS: Final = (
    *("torn", "written", "kept", "rewritten", "renamed"),
    *("asked", "answered", "settled", "fetched", "recorded"),
)
_left = 0


def killed_at(point: str, passings: int = 1) -> dict[str, str]:
    """Return the variables of a process that must not get past this."""
    assert point in POINTS
    return {ORDER: f"{point} {passings}"}


def passing(point: str) -> None:
    global _left
    wanted, _, passings = os.environ.get(ORDER, "").partition(" ")
    if point == wanted:
        _left = (_left or int(passings)) - 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
