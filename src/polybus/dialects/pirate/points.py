"""Named points of the client, at which a test may stop or kill the process that comes by.

    torn        half of a record is in the journal
    written     all of it is, and nothing says that the disk has it
    kept        the disk has it, and memory does not know
    rewritten   a shorter journal is written beside the old one
    renamed     it has taken its place, and the folder is not on disk
    asked       a request is in the journal, and was not sent
    answered    its answer is here, and not in the journal
    settled     it is in the journal, and the caller does not know
    fetched     a message is here, and its LAST not in the journal
    recorded    its LAST is in the journal

$POLYBUS_POINTS names the module to ask; nobody but the tests of faults sets it, and
without it a point is one comparison.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Final

VARIABLE: Final = "POLYBUS_POINTS"
POINTS: Final = (
    "torn",
    "written",
    "kept",
    "rewritten",
    "renamed",
    "asked",
    "answered",
    "settled",
    "fetched",
    "recorded",
)
_asked: Final = os.environ.get(VARIABLE, "")
WATCHED: Final = bool(_asked)


def passing(point: str, detail: str = "") -> None:
    if _asked:
        import_module(_asked).passing(point, detail)
