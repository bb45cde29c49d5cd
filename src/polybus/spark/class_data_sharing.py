"""Java class data sharing: a file with Spark's parsed classes, which halves the start of a session.

Spark loads about twenty thousand classes before its first query is done. Java parses and verifies
each of them again in every process: five to eight seconds of CPU time. `make setup` writes an
archive of the parsed classes of a typical query (`tests.rig.spark.class_archive`). Java compares
its version and class path with the archive at start, and ignores an archive that does not match.
"""

from __future__ import annotations

import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "share" / "polybus" / "spark.jsa"
SILENTLY = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


def load_flags(archive: Path = ARCHIVE) -> str:
    """Return Java options that use the archive; empty if it does not exist."""
    return f"-XX:SharedArchiveFile={archive} {SILENTLY}" if archive.is_file() else ""


def dump_flags(archive: Path) -> str:
    """Return Java options that write the archive when Java exits."""
    return f"-XX:ArchiveClassesAtExit={archive} {SILENTLY}"
