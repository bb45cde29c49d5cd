"""Ways to break source and sink on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas, as for the store (`store/lmdb/sabotage.py`,
whose `stamps-off` takes the sink's stamps, too); nobody but the tests of faults sets it.

    tasks-publish   each task publishes what it has staged, and marks its part of the epoch
                    as done; the driver publishes nothing
    latest-again    a first batch that is planned again begins where "latest" is then
    losses-unseen   a task that finds messages missing goes on without a word
    archive-positions-off   the archive adds what a batch has, whatever it has already
    marks-off       dead letters that were re-queued are not known as such
    parts-add       a batch of stats that is counted again stands beside what it was before
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "POLYBUS_SABOTAGE"
_chosen = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))

TASKS_PUBLISH: Final = "tasks-publish" in _chosen
LATEST_AGAIN = "latest-again" in _chosen
LOSSES_UNSEEN = "losses-unseen" in _chosen
ARCHIVE_POSITIONS_OFF = "archive-positions-off" in _chosen
MARKS_OFF = "marks-off" in _chosen
PARTS_ADD = "parts-add" in _chosen
