"""Named points of the sink at which a test may have a process killed, and prove that it was.

$POLYBUS_KILLS names a folder. Whoever comes by a point looks there for a file of the
point's name; without the variable that is one comparison. The file says whom to kill, by
process ids, or `self`. It is renamed to NAME.killed first: that happens once, whoever else
comes by, and it is the proof. SIGKILL leaves nobody a chance to tidy up.

    planned     the driver prepares an epoch: the last one is in Spark's commit log
    begun       a task has opened its stage, and put nothing into it
    mid-stage   it has put something
    staged      all of it is on disk, and the task has not told the driver
    publishing  the driver is about to publish
    published   it has, and Spark's commit log does not know
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

VARIABLE: Final = "POLYBUS_KILLS"
POINTS: Final = ("planned", "begun", "mid-stage", "staged", "publishing", "published")
SELF: Final = "self"
_folder: Final = os.environ.get(VARIABLE, "")


def passing(point: str) -> None:
    if _folder:
        _obey(Path(_folder) / point)


def _obey(order: Path) -> None:
    try:
        whom = order.read_text().split()
        order.rename(order.with_name(order.name + ".killed"))
    except FileNotFoundError:
        return  # nobody is to die here, or somebody has
    for pid in whom:
        os.kill(os.getpid() if pid == SELF else int(pid), signal.SIGKILL)
    if SELF not in whom:
        signal.pause()  # the driver is dead, and we go with it
