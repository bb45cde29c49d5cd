"""Ways to break calls on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    gone-off        calls of a service that went away are forgotten without a word
    deadlines-off   no call is ever too late
    cancel-off      services are not told that a call was cancelled
    late-off        replies that nobody waits for are not counted
    pressure-off    nobody is ever full
    ids-off         a second call with an open request id takes the place of the first
    sizes-off       packets may be of any size
"""

from __future__ import annotations

import os
from typing import Final

_chosen = os.environ.get("POLYBUS_SABOTAGE", "").split(",")

GONE_OFF: Final = "gone-off" in _chosen
DEADLINES_OFF: Final = "deadlines-off" in _chosen
CANCEL_OFF: Final = "cancel-off" in _chosen
LATE_OFF: Final = "late-off" in _chosen
PRESSURE_OFF: Final = "pressure-off" in _chosen
IDS_OFF: Final = "ids-off" in _chosen
SIZES_OFF: Final = "sizes-off" in _chosen

ANY: Final = any((GONE_OFF, DEADLINES_OFF, CANCEL_OFF, LATE_OFF, PRESSURE_OFF, IDS_OFF, SIZES_OFF))
