"""Gets memory from the host before something is measured that writes files.

What is written goes into memory first, page after page that was free before. A virtual machine may
give its free pages back to its host, which takes them, and backs them again when they are touched
again: on such a machine a first gigabyte went into the page cache at 580 MB/s, and the next one,
into the same pages, at 3000 to 3800 MB/s. One would measure the host, and which contender came
first. So a file is written, and removed again, right before each measurement: its pages are free,
and still backed. It is the same for all, and never reaches the disk.

It is written in large pieces, since the host gets free memory by 2 MiB: those are what a large
write takes first. Pieces of 1 MiB came from what was left over between them, and a contender with
large writes still met memory without backing, for 460 MB/s in the middle of a measurement.
"""

import os
from pathlib import Path

from bench.harness.places import output_folder

PIECE = bytes(4 << 20)
PIECES = 256  # more than any contender writes in one measurement


def back_memory() -> None:
    path = output_folder() / "backed.tmp"
    try:
        _fill(path)
    finally:
        path.unlink(missing_ok=True)


def _fill(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(PIECES):
            os.write(descriptor, PIECE)
    finally:
        os.close(descriptor)
