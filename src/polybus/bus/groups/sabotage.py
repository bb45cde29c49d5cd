"""Ways to break the coordinator on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    fencing-off     acks and transactions of members and shards with old epochs are taken
    repeats-off     a transaction is done again, though its message is acked
"""

from __future__ import annotations

import os
from typing import Final

_chosen = os.environ.get("POLYBUS_SABOTAGE", "").split(",")

FENCING_OFF: Final = "fencing-off" in _chosen
REPEATS_OFF: Final = "repeats-off" in _chosen
