"""What of a topic is archived: the files that count, and how far each shard goes.

A file has for each of its shards one range of offsets, without gaps; files stand in the order
in which they were added (`_place`), and that is the order of offsets in each shard. So where a
shard is archived up to is one number, and each row is in one file.

The newest manifest of a topic, and the next: numbered files that are never changed.

The next one is made whole under another name, and gets its number by a link, which fails if
the number is taken: of two that add at once one has to begin again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.errors import Conflict, Damaged
from polybus.spark.archive.archive_folder import OWN, TOPICS, VERSION, sync_folder

if TYPE_CHECKING:
    from polybus.spark.archive.archive_folder import ArchiveFolder
DIGITS = 20
KEPT_MANIFESTS = 8  # old ones, for whoever wants to know what was before


class OffsetSpan(NamedTuple):
    """Offsets `start` to `end` (exclusive) of a shard."""

    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ArchivedFile:
    """`path` is relative to the archive. Times are the bus's, of its first and last row."""

    path: str
    date: str
    size_bytes: int
    first_ns: int
    last_ns: int
    shards: Mapping[int, OffsetSpan]

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.shards.values())

    def as_json(self) -> dict[str, Any]:
        shards = {str(shard): list(span) for shard, span in sorted(self.shards.items())}
        return {**vars(self), "shards": shards}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ArchivedFile:
        shards = {
            int(shard): OffsetSpan(*map(int, span)) for shard, span in given["shards"].items()
        }
        known = {one.name: given[one.name] for one in fields(cls)}
        return cls(**{**known, "shards": shards})


class OffsetGap(NamedTuple):
    """Of a shard, between two files."""

    shard: int
    lost: OffsetSpan
    between: tuple[ArchivedFile, ArchivedFile]


class LastRow(NamedTuple):
    """The last row of a shard: whether a log is the one that was archived shows there."""

    id: int
    timestamp_ns: int


class ReplacedFile(NamedTuple):
    """A file that compaction has made needless; who reads it by an older manifest still may."""

    path: str
    since_s: int


@dataclass(frozen=True)
class Manifest:
    topic: str
    number: int = 0
    files: tuple[ArchivedFile, ...] = ()
    shards: Mapping[int, OffsetSpan] = field(default_factory=dict)
    lasts: Mapping[int, LastRow] = field(default_factory=dict)
    replaced: tuple[ReplacedFile, ...] = ()

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.files)

    def end(self, shard: int) -> int | None:
        """How far it is archived; None: nothing of it is."""
        found = self.shards.get(shard)
        return None if found is None else found.end

    def find_files(self, shard: int, start: int, end: int) -> list[ArchivedFile]:
        """The files that have some of these rows, in their order."""
        return [
            one
            for one in self.files
            if shard in one.shards
            and one.shards[shard].start < end
            and start < one.shards[shard].end
        ]

    def gaps(self) -> Iterator[OffsetGap]:
        """What was lost before it was archived."""
        last: dict[int, ArchivedFile] = {}
        for file in self.files:
            for shard, span in file.shards.items():
                before = last.get(shard, file)
                if before.shards[shard].end < span.start:
                    yield OffsetGap(
                        shard, OffsetSpan(before.shards[shard].end, span.start), (before, file)
                    )
                last[shard] = file

    def paths(self, shard: int, start: int, end: int) -> list[str]:
        return [one.path for one in self.find_files(shard, start, end)]

    def added(
        self, files: Iterable[ArchivedFile], lasts: Mapping[int, LastRow], *, gaps: bool = False
    ) -> Manifest:
        """The next, with these files. `Conflict` if they do not follow what is there."""
        new = sorted(files, key=_place)
        shards = dict(self.shards)
        for file in new:
            for shard, span in file.shards.items():
                known = shards.setdefault(shard, OffsetSpan(span.start, span.start))
                self._check_follows(shard, known.end, span.start, gaps=gaps)
                shards[shard] = OffsetSpan(known.start, max(known.end, span.end))
        return replace(
            self,
            number=self.number + 1,
            files=(*self.files, *new),
            shards=shards,
            lasts={**self.lasts, **lasts},
        )

    def compacted(self, old: Sequence[ArchivedFile], new: ArchivedFile, now_s: float) -> Manifest:
        """The next, with one file in place of several of its date that follow one another."""
        paths = {one.path for one in old}
        files = [new if one == old[0] else one for one in self.files]
        gone = tuple(ReplacedFile(one.path, int(now_s)) for one in old)
        return replace(
            self,
            number=self.number + 1,
            files=tuple(one for one in files if one.path not in paths),
            replaced=(*self.replaced, *gone),
        )

    def without_replaced(self, kept: Collection[str]) -> Manifest:
        """The next, with only these of the replaced files."""
        replaced = tuple(one for one in self.replaced if one.path in kept)
        return replace(self, number=self.number + 1, replaced=replaced)

    def _check_follows(self, shard: int, end: int, start: int, *, gaps: bool) -> None:
        if start == end or (gaps and start > end):
            return
        raise Conflict(
            f"topic {self.topic!r}, shard {shard} is archived up to {end}, and was to go on with "
            f"{start}: another one adds to this archive, or the checkpoint is of another archive"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "topic": self.topic,
            "number": self.number,
            "shards": {
                str(n): {**span._asdict(), **self.lasts[n]._asdict()}
                for n, span in sorted(self.shards.items())
            },
            "files": [one.as_json() for one in self.files],
            "replaced": [one._asdict() for one in self.replaced],
        }

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Manifest:
        try:
            shards = {int(n): one for n, one in given["shards"].items()}
            return cls(
                given["topic"],
                given["number"],
                tuple(map(ArchivedFile.parse, given["files"])),
                {n: OffsetSpan(one["start"], one["end"]) for n, one in shards.items()},
                {n: LastRow(one["id"], one["timestamp_ns"]) for n, one in shards.items()},
                tuple(ReplacedFile(one["path"], one["since_s"]) for one in given["replaced"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"a manifest of the archive is not one: {error!r}") from None


def _place(file: ArchivedFile) -> tuple[str, tuple[int, int]]:
    """By day before all else: a shard's times never go back, but a file of today may have an
    earlier shard than the file of yesterday that its task wrote beside it."""
    return file.date, min((shard, span.start) for shard, span in file.shards.items())


def list_archived_topics(folder: ArchiveFolder) -> list[str]:
    """Those that something was archived of."""
    places = (folder.path / OWN / TOPICS).glob("*/")
    return sorted(one.topic for place in places if (one := _newest(place)) is not None)


def read_manifest(folder: ArchiveFolder, topic: str) -> Manifest:
    """An empty one if nothing was archived yet."""
    return _newest(folder.manifests(topic)) or Manifest(topic)


def _newest(place: Path) -> Manifest | None:
    while True:
        numbers = _numbers(place)
        if not numbers:
            return None
        path = _path(place, numbers[-1])
        try:
            return Manifest.parse(json.loads(path.read_text()))
        except FileNotFoundError:
            continue  # it was the newest when we looked, and is an old one by now
        except ValueError as error:
            raise Damaged(f"{path} is no manifest: {error}") from None


def commit_manifest(folder: ArchiveFolder, manifest: Manifest) -> None:
    """From now on it is the newest. `Conflict` if another one has its number."""
    place = folder.manifests(manifest.topic)
    place.mkdir(parents=True, exist_ok=True)
    draft = place / f".{os.getpid()}.new"
    try:
        with draft.open("w") as file:
            json.dump(manifest.as_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, _path(place, manifest.number))
    except FileExistsError:
        raise Conflict(
            f"somebody else adds to the archive of topic {manifest.topic!r}: end one of the two"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(place)
    for number in _numbers(place)[:-KEPT_MANIFESTS]:
        _path(place, number).unlink(missing_ok=True)


def _numbers(place: Path) -> list[int]:
    try:
        names = [one.name for one in place.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name[:DIGITS]) for name in names if name[:DIGITS].isdigit())


def _path(place: Path, number: int) -> Path:
    return place / f"{number:0{DIGITS}}.json"
