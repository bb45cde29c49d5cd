"""Possible disk contents after a power cut: images made of a record of writes and syncs.

The model is a strict disk under a strict file system:

- A write is safe once a sync of its file that began after it has ended, or if the file
  was opened O_DSYNC or O_SYNC. Before that each of its parts (512 bytes, 4 KiB, or the
  whole, by chance) may be on disk or not, independently of the others: this gives
  lost, reordered and torn writes alike.
- A name (a file made, renamed, removed) is safe once its folder was synced. Of the other
  names, the disk has the first few, in the order in which they were made.
- Nothing that is safe is ever lost.

    for image in images(records(log), watched, choices, 100): image.write(folder)

`image.marks` are the test's marks before the cut, which the image must satisfy.
Everything follows from the record and the seed of `choices`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from tests.rig.power.recorder import Kind, Record

SAFE_FLAGS: Final = os.O_DSYNC  # O_SYNC has this bit as well
SECTOR: Final = 512
PAGE: Final = 4096
WHOLE: Final = 1 << 40

# How much unsafe data reaches the disk: the size of its parts, and the odds of each part.
WAYS: Final = (
    ("nothing that was not synced", WHOLE, 0.0),
    ("all that was written", WHOLE, 1.0),
    ("some writes", WHOLE, 0.5),
    ("some pages", PAGE, 0.5),
    ("most pages", PAGE, 0.9),
    ("few pages", PAGE, 0.1),
    ("some sectors", SECTOR, 0.5),
)


class Change(NamedTuple):
    """Bytes at an offset; None: the file was truncated there. Every disk has the safe changes."""

    offset: int
    data: bytes | None
    safe: bool = False


@dataclass(eq=False)
class File:
    """Bytes that are safe, and all that was done to them since."""

    content: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)
    settled: int = 0  # how many changes have left `pending`

    @property
    def changes(self) -> int:
        """The number of all changes, safe or not."""
        return self.settled + len(self.pending)

    def settle(self, changes: int) -> None:
        """Mark the first `changes` changes as safe."""
        fresh = max(0, changes - self.settled)
        for change in self.pending[:fresh]:
            apply(self.content, change)
        del self.pending[:fresh]
        self.settled += fresh


@dataclass(eq=False)
class Folder:
    """The names that are safe."""

    names: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


@dataclass(eq=False, frozen=True)
class Naming:
    """A change of a name in a folder: it now means `node`, or nothing; `source` is its old name."""

    folder: Folder
    name: str
    node: Node | None
    source: tuple[Folder, str] | None = None


def apply(content: bytearray, change: Change) -> None:
    missing = change.offset - len(content)
    content.extend(bytes(max(0, missing)))
    if change.data is None:
        del content[change.offset :]
    else:
        content[change.offset : change.offset + len(change.data)] = change.data


def parts(change: Change, size: int) -> Iterator[Change]:
    """A change in pieces that end where the disk's own parts do."""
    if change.data is None or change.safe:
        yield change
        return
    at = 0
    while at < len(change.data):
        place = change.offset + at
        end = at + size - place % size
        yield Change(place, change.data[at:end])
        at = end


class Disk:
    """Replays a record of the changes below `watched`."""

    def __init__(self, watched: Path) -> None:
        self._watched = PurePosixPath(watched.resolve())
        self._root = Folder()
        self._seen: dict[PurePosixPath, Node] = {PurePosixPath(): self._root}
        self._namings: list[Naming] = []  # not safe yet, in order
        self._opened: dict[int, tuple[Node, bool]] = {}
        self._syncing: dict[int, tuple[int, list[Naming]]] = {}
        self._marks: list[bytes] = []

    def apply(self, record: Record) -> None:
        match record.kind:
            case Kind.OPENED:
                self._open(record)
            case Kind.WRITTEN:
                self._change(record, record.data)
            case Kind.CUT:
                self._change(record, None)
            case Kind.SYNCING:
                self._sync(record)
            case Kind.SYNCED:
                self._settle(record)
            case Kind.RENAMED:
                self._rename(*(self._path(part) for part in record.data.split(b"\0")))
            case Kind.REMOVED:
                self._name(self._path(record.data), None)
            case Kind.FOLDER:
                self._name(self._path(record.data), Folder())
            case Kind.MARK:
                self._marks.append(record.data)

    def image(self, place: int, choices: random.Random) -> Image:
        """A disk that the power may have left at this moment."""
        how, size, odds = choices.choice(WAYS)
        certain = odds in (0.0, 1.0)
        kept = int(odds) * len(self._namings) if certain else choices.randint(0, len(self._namings))
        survivor = Survivor(size, odds, choices, self._namings[:kept])
        tree = survivor.folder(self._root)
        lost = survivor.lost + len(self._namings) - kept
        at_risk = survivor.at_risk + len(self._namings)
        return Image(place, how, list(self._marks), tree, lost, at_risk)

    # --- files

    def _open(self, record: Record) -> None:
        path = self._path(record.data)
        if path not in self._seen:
            self._name(path, File())
        node = self._seen[path]
        self._opened[record.handle] = node, bool(record.flags & SAFE_FLAGS)
        if record.flags & os.O_TRUNC and isinstance(node, File):
            node.pending.append(Change(0, None))

    def _change(self, record: Record, data: bytes | None) -> None:
        file, safe = self._opened[record.handle]
        assert isinstance(file, File)
        file.pending.append(Change(record.offset, data, safe))

    def _sync(self, record: Record) -> None:
        node, _ = self._opened[record.handle]
        changes = node.changes if isinstance(node, File) else 0
        namings = [naming for naming in self._namings if naming.folder is node]
        self._syncing[record.offset] = changes, namings

    def _settle(self, record: Record) -> None:
        node, _ = self._opened[record.handle]
        changes, namings = self._syncing.pop(record.offset)
        if isinstance(node, File):
            node.settle(changes)
        for naming in [one for one in namings if one in self._namings]:
            self._namings.remove(naming)
            name(naming, naming.folder.names, naming.source and naming.source[0].names)

    # --- names

    def _path(self, data: bytes) -> PurePosixPath:
        return PurePosixPath(os.fsdecode(data)).relative_to(self._watched)

    def _parent(self, path: PurePosixPath) -> Folder:
        folder = self._seen[path.parent]
        assert isinstance(folder, Folder)
        return folder

    def _name(self, path: PurePosixPath, node: Node | None) -> None:
        self._seen.pop(path, None)
        if node is not None:
            self._seen[path] = node
        self._namings.append(Naming(self._parent(path), path.name, node))

    def _rename(self, old: PurePosixPath, new: PurePosixPath) -> None:
        below = [path for path in self._seen if path == old or old in path.parents]
        for path in below:
            self._seen[new / path.relative_to(old)] = self._seen.pop(path)
        source = self._parent(old), old.name
        self._namings.append(Naming(self._parent(new), new.name, self._seen[new], source))


Names = dict[str, Node]


def name(naming: Naming, names: Names, source_names: Names | None) -> None:
    if naming.source is not None and source_names is not None:
        source_names.pop(naming.source[1], None)
    names.pop(naming.name, None)
    if naming.node is not None:
        names[naming.name] = naming.node


class Survivor:
    """Builds a tree of all safe changes and a random part of the others."""

    def __init__(
        self, size: int, odds: float, choices: random.Random, namings: list[Naming]
    ) -> None:
        self._size, self._odds, self._choices = size, odds, choices
        self._names: dict[Folder, Names] = {}
        self.lost = self.at_risk = 0
        for naming in namings:
            source = naming.source and self._names_of(naming.source[0])
            name(naming, self._names_of(naming.folder), source)

    def folder(self, folder: Folder) -> Tree:
        names = self._names_of(folder)
        return {
            name: self.file(node) if isinstance(node, File) else self.folder(node)
            for name, node in names.items()
        }

    def file(self, file: File) -> bytes:
        content = bytearray(file.content)
        for change in file.pending:
            for part in parts(change, self._size):
                if self._keep(part):
                    apply(content, part)
        return bytes(content)

    def _keep(self, part: Change) -> bool:
        if part.safe:
            return True
        self.at_risk += 1
        kept = self._choices.random() < self._odds
        self.lost += not kept
        return kept

    def _names_of(self, folder: Folder) -> Names:
        return self._names.setdefault(folder, dict(folder.names))


Tree = dict[str, "bytes | Tree"]


@dataclass(frozen=True)
class Image:
    """One possible disk: its files, and the marks before the cut."""

    place: int  # in the record
    how: str
    marks: list[bytes]
    tree: Tree
    lost: int  # parts of writes, and names, that are missing
    at_risk: int  # parts of writes, and names, that were not safe

    def write(self, folder: Path) -> None:
        write_tree(self.tree, folder)

    def __str__(self) -> str:
        return f"cut at record {self.place}, keeping {self.how}: {self.lost}/{self.at_risk} lost"


def write_tree(tree: Tree, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            write_tree(node, folder / name)


def images(
    record: Iterable[Record], watched: Path, choices: random.Random, count: int
) -> Iterator[Image]:
    """Yield `count` images, cut at random places of the record."""
    record = list(record)
    disk, at = Disk(watched), 0
    for cut in sorted(choices.randint(0, len(record)) for _ in range(count)):
        for one in record[at:cut]:
            disk.apply(one)
        at = cut
        yield disk.image(cut, choices)
