"""A way to break the coordinator on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    fencing-off     acks and transactions of members and shards with old epochs are taken
"""

from __future__ import annotations

import os
from typing import Final

FENCING_OFF: Final = "fencing-off" in os.environ.get("POLYBUS_SABOTAGE", "").split(",")
