"""A way to break the client on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    journal-off     what the client knows is in memory alone
"""

from __future__ import annotations

import os

JOURNAL_OFF = "journal-off" in os.environ.get("POLYBUS_SABOTAGE", "").split(",")
