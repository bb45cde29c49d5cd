"""Ways to break subscribers on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    replies-off     a repeated counter is not answered from what is stored: it is done again
    greetings-off   each copy of a HELLO takes a new epoch
    last-off        what a subscriber has read is answered for, and not stored
    collect-all     messages go that somebody has still to read
    epochs-off      clients go on though others of their id were started since
"""

from __future__ import annotations

import os
from typing import Final

_chosen = os.environ.get("POLYBUS_SABOTAGE", "").split(",")

REPLIES_OFF: Final = "replies-off" in _chosen
GREETINGS_OFF: Final = "greetings-off" in _chosen
LAST_OFF: Final = "last-off" in _chosen
COLLECT_ALL: Final = "collect-all" in _chosen
EPOCHS_OFF: Final = "epochs-off" in _chosen
