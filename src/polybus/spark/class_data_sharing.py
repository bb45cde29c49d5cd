"""Java's classes as they lie in memory, kept in a file: a session starts in half the time.

Spark needs some twenty thousand classes before its first query is done, and Java reads, checks
and lays out each of them anew in every program: five to eight seconds of a processor. What one
program has laid out it can leave to others. `make setup` has it done, for a query as they are
(`tests.rig.spark.class_archive`). A file that does not fit, since Java or Spark are others by now,
is not used: Java compares them when it starts, and goes on as it would without.
"""

from __future__ import annotations

import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "share" / "polybus" / "spark.jsa"
SILENTLY = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


def load_flags(archive: Path = ARCHIVE) -> str:
    """For Java's command line; nothing if nobody has made the file."""
    return f"-XX:SharedArchiveFile={archive} {SILENTLY}" if archive.is_file() else ""


def dump_flags(archive: Path) -> str:
    """For the command line of a Java that makes the file when it ends."""
    return f"-XX:ArchiveClassesAtExit={archive} {SILENTLY}"
