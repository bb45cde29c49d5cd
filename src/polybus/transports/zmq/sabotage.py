"""Ways to break the watch on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    watch-off       messages without an end, and answers that nobody takes, have no bound
"""

from __future__ import annotations

import os
from typing import Final

_chosen = os.environ.get("POLYBUS_SABOTAGE", "").split(",")

WATCH_OFF: Final = "watch-off" in _chosen
