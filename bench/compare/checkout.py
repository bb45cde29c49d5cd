"""A checkout that can be measured: its files, its compiled kernel, and a Python that imports them.

The commit is exported to build/compare/COMMIT and compiled there once; later calls use it again.
Each checkout has a virtual environment that holds no packages itself: its .pth file leads to the
sources of the checkout first and to the packages of this environment after them. So every process
that a benchmark starts by its interpreter, workers of Spark included, imports the right package,
and each checkout has its own `polybus` command and entry points.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from bench.harness.places import REPOSITORY

FOLDER = REPOSITORY / "build" / "compare"
# Benchmarks of commits before this patch report CPU time for rqueue, Freud and GSB alone.
CPU_PATCH = Path(__file__).with_name("cpu.patch")
COMMAND = """#!{python}
import runpy

runpy.run_module("polybus", run_name="__main__", alter_sys=True)
"""


class CheckoutFailed(Exception):
    """The checkout could not be made; the text is the output of the program that failed."""


@dataclass(frozen=True)
class Checkout:
    label: str
    folder: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """Without the scripts of this environment, where peers are found that need not run."""
        own = {sysconfig.get_path("scripts"), str(Path(sys.executable).parent)}
        rest = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part not in own]
        environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        environment["PATH"] = os.pathsep.join([str(self.python.parent), *rest])
        environment["PYTHONPATH"] = f"{self.folder / 'src'}{os.pathsep}{self.folder}"
        return environment


def working_tree() -> Checkout:
    """This checkout as it is, with uncommitted changes, and its kernel compiled again if needed."""
    commit = _run(["git", "rev-parse", "HEAD"], REPOSITORY)
    changed = _run(["git", "status", "--porcelain", "-uno"], REPOSITORY)
    label = f"{commit[:10]} with changes" if changed else commit[:10]
    checkout = Checkout(label, REPOSITORY, _environment(FOLDER / "working-tree.venv", REPOSITORY))
    _build(checkout)
    return checkout


def of_commit(ref: str) -> Checkout:
    """The checkout of a commit, from the cache if it is there."""
    commit = _run(["git", "rev-parse", "--verify", f"{ref}^{{commit}}"], REPOSITORY)
    label = commit[:10]
    # Short, because benchmarks bind Unix sockets below it and their paths have at most 107 bytes.
    folder, ready = FOLDER / label, FOLDER / f"{label}.ready"
    python = _environment(FOLDER / f"{label}.venv", folder)
    checkout = Checkout(label, folder, python)
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _export(commit, folder)
        _build(checkout)
        ready.touch()
    return checkout


def _export(commit: str, folder: Path) -> None:
    archive = FOLDER / f"{commit}.tar"
    _run(["git", "archive", "-o", str(archive), commit], REPOSITORY)
    _run(["tar", "-xf", str(archive)], folder)
    archive.unlink()
    # Outside of a repository, so that git takes the paths as they are in the patch.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(FOLDER)}
    command = ["git", "apply", str(CPU_PATCH)]
    applied = subprocess.run(command, cwd=folder, env=outside, capture_output=True, check=False)
    if applied.returncode:
        print(f"{commit[:10]}: CPU time is measured by its own benchmarks", file=sys.stderr)


def _environment(folder: Path, checkout: Path) -> Path:
    """Returns the interpreter of a virtual environment for the checkout."""
    python = folder / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], REPOSITORY)
    packages = _packages(folder)
    lines = [str(checkout / "src"), str(checkout), sysconfig.get_path("purelib")]
    (packages / "compare.pth").write_text("\n".join(lines) + "\n")
    command = folder / "bin" / "polybus"
    command.write_text(COMMAND.format(python=python))
    command.chmod(0o755)
    return python


def _packages(environment: Path) -> Path:
    scheme = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", scheme))


def _build(checkout: Checkout) -> None:
    """Compile the kernel, and write the entry points where this checkout's Python finds them."""
    entry_points = ["egg_info", "--egg-base", str(_packages(checkout.python.parents[1]))]
    print(f"compiling the kernel of {checkout.label}", file=sys.stderr, flush=True)
    command = [str(checkout.python), "setup.py", "-q", *entry_points, "build_ext", "--inplace"]
    _run(command, checkout.folder, checkout.environment())


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Returns the standard output, without the last newline."""
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        text = (ended.stderr or ended.stdout).strip()
        raise CheckoutFailed(f"{' '.join(command)}: exit code {ended.returncode}\n{text}")
    return ended.stdout.strip()
