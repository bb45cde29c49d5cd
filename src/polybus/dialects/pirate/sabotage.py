"""Ways to break the client on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting.

    journal-off             what the client knows is in memory alone
    journal-sync-off        nothing waits for the disk to have an event
    journal-rename-unsynced a journal that was written anew is used before it is on disk
"""

from __future__ import annotations

import os

_chosen = os.environ.get("POLYBUS_SABOTAGE", "").split(",")

JOURNAL_OFF = "journal-off" in _chosen
SYNC_OFF = "journal-sync-off" in _chosen
RENAME_UNSYNCED = "journal-rename-unsynced" in _chosen
