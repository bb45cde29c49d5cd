"""Named points of sink and pipelines, where a test may stop, fail or kill who comes by.

    planned     the driver prepares an epoch: the last one is in Spark's commit log
    begun       a task has its first rows, and no stage yet
    mid-stage   it has put something into its stage
    staged      all of it is on disk, and the task has not told the driver
    publishing  the driver is about to publish
    published   it has, and Spark's commit log does not know

And of the archive:

    mid-file    a task has written a part of a file
    written     all of its files are on disk, and the task has not told the driver
    archiving   the driver is about to make the files of a batch a part of the archive
    archived    it has, and Spark's commit log does not know
    compacted   a large file is written, and the small ones still count
    trimming    retain is about to trim a topic
    trimmed     it has

Of the source, and of stats:

    reading     a task has handed a few rows to Spark
    counting    a batch is about to be counted
    counted     its sums are on disk, and Spark's commit log does not know

$POLYBUS_POINTS names the module to ask (`polybus.testing.sparkpoints`); nobody but the
tests of faults sets it, and without it a point is one comparison.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Final

VARIABLE: Final = "POLYBUS_POINTS"
POINTS: Final = (
    *("planned", "begun", "mid-stage", "staged", "publishing", "published"),
    *("mid-file", "written", "archiving", "archived", "compacted", "trimming", "trimmed"),
    *("reading", "counting", "counted"),
)
_asked: Final = os.environ.get(VARIABLE, "")


def passing(point: str, detail: str = "") -> None:
    if _asked:
        import_module(_asked).passing(point, detail)
