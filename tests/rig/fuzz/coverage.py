"""The Python side of coverage.c: branches taken by compiled code, and its comparison operands.

Code under test is compiled with FLAGS. The library must be in the process before
that code is loaded, so it is preloaded: `preload` gives the environment for that,
and the child then opens it with `Coverage()`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

FLAGS = "-fsanitize-coverage=trace-pc,trace-cmp"
MAX_CONSTANTS = 512  # as in coverage.c
SOURCE = Path(__file__).with_name("coverage.c")
LIBRARY_VARIABLE = "POLYBUS_COVERAGE_LIBRARY"


def build_library(folder: Path) -> Path:
    """Compile coverage.c into the folder, unless that was done since it last changed."""
    library = folder / "libpolybus_coverage.so"
    if library.exists() and library.stat().st_mtime >= SOURCE.stat().st_mtime:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "gcc")
    command = [compiler, "-O2", "-g", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


def preload(library: Path) -> dict[str, str]:
    """An environment in which a child process has the library.

    It goes before any other preload: a sanitizer's runtime has empty functions of the
    same names, and needs an option that allows it to come second.
    """
    others = os.environ.get("LD_PRELOAD", "").split()
    asan_options = os.environ.get("ASAN_OPTIONS", "")
    return {
        **os.environ,
        "LD_PRELOAD": " ".join([str(library.resolve()), *others]),
        "ASAN_OPTIONS": f"{asan_options}:verify_asan_link_order=0".lstrip(":"),
        LIBRARY_VARIABLE: str(library.resolve()),
    }


class Coverage:
    """The map of this process; only in a process started with `preload`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY_VARIABLE])
        self.start = self._library.coverage_start
        self._stop = self._library.coverage_stop
        constants = ctypes.c_uint64 * MAX_CONSTANTS
        self._constants = constants.in_dll(self._library, "coverage_constants")
        self._constant_count = ctypes.c_uint.in_dll(self._library, "coverage_constant_count")

    def stop(self) -> int:
        """End the run since `start`. Returns the number of its new behaviours."""
        return int(self._stop())

    def edges(self) -> int:
        """Return the number of edges taken since the start."""
        return int(self._library.coverage_edges())

    def constants(self, since: int) -> list[int]:
        """Return the operands of comparisons, in the order in which the code first used them."""
        return self._constants[since : self._constant_count.value]
