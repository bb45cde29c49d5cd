"""Ways to break consumers on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    care-off        what a dead consumer was handed is run as if it were new
    acks-forgotten  what could not be told to the bus is not told again
    rejoin-off      whoever was taken for dead stays so
"""

from __future__ import annotations

import os

_chosen = os.environ.get("POLYBUS_SABOTAGE", "").split(",")

CARE_OFF = "care-off" in _chosen
ACKS_FORGOTTEN = "acks-forgotten" in _chosen
REJOIN_OFF = "rejoin-off" in _chosen
