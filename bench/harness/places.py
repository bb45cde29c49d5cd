"""Where things are: the sources of the load, and the folder for everything a run leaves behind."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOAD_SOURCES = REPOSITORY / "bench" / "load"
OUTPUT = REPOSITORY / "build" / "bench"

# -O2: what a distribution would use; warnings are errors to us.
C_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")


class Unavailable(Exception):
    """A program that a benchmark needs is not on this machine; the text says how to get it."""


def output_folder() -> Path:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    return OUTPUT


def installed(program: str, hint: str) -> Path:
    """The path of a program: beside our Python, where wheels put theirs, or on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / program
    if beside.exists():
        return beside
    found = shutil.which(program)
    if found is None:
        raise Unavailable(f"{program} is not installed: {hint}")
    return Path(found)


def compiled(program: str, *sources: str) -> Path:
    """Compiles C sources of bench/load/ into the output folder, unless that is newer than they."""
    target = output_folder() / program
    paths = [LOAD_SOURCES / source for source in sources]
    newest = max(path.stat().st_mtime for path in LOAD_SOURCES.iterdir())
    if target.exists() and target.stat().st_mtime > newest:
        return target
    compiler = os.environ.get("CC") or str(installed("gcc", "apt-get install gcc"))
    subprocess.run([compiler, *C_FLAGS, "-o", str(target), *map(str, paths)], check=True)
    return target
