"""Patches of the package's source, and copies of the package that have them applied.

A patch replaces text in files of `src/polybus`. Each `old` text must occur exactly once, so
that a patch whose code was rewritten fails instead of changing nothing. Mutants
(`tests/mutants`), sabotages (`tests/rig/sabotage`) and kill points (`tests/rig/points.py`)
are patches.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# The package that this process imports, found without importing it. In a run under sabotage
# that is a patched copy, and patches of kill points are applied on top of it.
PACKAGE = Path(find_spec("polybus").origin).parent  # type: ignore[union-attr, arg-type]
COPIES = ROOT / "build" / "patched"
# Temporary names of bytecode files: they may disappear while they are copied.
PASSING_FILES = shutil.ignore_patterns("*.pyc.*")


class DoesNotApply(Exception):
    """The text that a patch replaces does not occur exactly once."""


class Edit(NamedTuple):
    file: str  # in src/polybus
    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    name: str
    file: str  # in src/polybus
    old: str
    new: str
    more: tuple[Edit, ...] = ()

    @property
    def edits(self) -> Iterator[Edit]:
        yield Edit(self.file, self.old, self.new)
        yield from self.more

    def texts(self, package: Path = PACKAGE) -> dict[str, str]:
        """Return the new text of each file that the patch changes. Raises DoesNotApply."""
        texts: dict[str, str] = {}
        for file, old, new in self.edits:
            if file not in texts:
                texts[file] = _read(locate(package, file), self.name)
            times = texts[file].count(old)
            if times != 1:
                raise DoesNotApply(f"{self.name}: {file}: its text occurs {times} times: {old!r}")
            texts[file] = texts[file].replace(old, new)
        return texts

    def apply(self, package: Path) -> None:
        """Write the changed files. Hard links to the originals are replaced, not written to."""
        for file, text in self.texts(package).items():
            path = locate(package, file)
            path.unlink()
            path.write_text(text)
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink(missing_ok=True)


def locate(package: Path, file: str) -> Path:
    """Return the path of a patched file. The rig's own files are named from the repository on."""
    return package.parents[1] / file if file.startswith("tests/") else package / file


def patches(file: str, *changes: tuple[str, str, str]) -> list[Patch]:
    """Patches of one file: (name, old, new)."""
    return [Patch(name, file, old, new) for name, old, new in changes]


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise DoesNotApply(f"{name}: there is no file {path}") from None


# --- copies


def patched_copy(wanted: Iterable[Patch], package: Path = PACKAGE) -> Path:
    """Return the folder of a copy of the package with these patches; it goes with this process."""
    COPIES.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=COPIES))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # tests run programs as other users
    shutil.copytree(package, folder / "polybus", copy_function=_link, ignore=PASSING_FILES)
    for patch in wanted:
        patch.apply(folder / "polybus")
    return folder


def import_path(folder: Path) -> str:
    """Return the PYTHONPATH with which child processes import the copy in `folder`."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (str(folder), str(ROOT), inherited)))


def _link(source: str, target: str) -> None:
    """Compiled modules and bytecode are large, and most files stay as they are."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file of another user
        shutil.copy2(source, target)
