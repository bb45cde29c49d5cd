"""Kills the process that comes by a point of pirate's client, for the n-th time.

    env = {**os.environ, **killed_at("answered", 2)}

See `polybus.dialects.pirate.points` for the points.
"""

from __future__ import annotations

import os
import signal
from typing import Final

from polybus.dialects.pirate.points import POINTS, VARIABLE

ORDER: Final = "POLYBUS_KILL"
_left = 0


def killed_at(point: str, passings: int = 1) -> dict[str, str]:
    """The environment of a process that shall not get past this."""
    assert point in POINTS
    return {VARIABLE: __name__, ORDER: f"{point} {passings}"}


def passing(point: str, detail: str) -> None:
    global _left
    wanted, _, passings = os.environ[ORDER].partition(" ")
    if point == wanted:
        _left = (_left or int(passings)) - 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
