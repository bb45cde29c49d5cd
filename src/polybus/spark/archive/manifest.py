"""Manifests: the files of an archived topic, and the offsets that are archived of each shard.

A file has one range of offsets per shard, without gaps. Files are listed in the order in which
they were added, which is the order of offsets in each shard. One number per shard therefore says
how far it is archived, and each row is in exactly one file.

Manifests are numbered files that never change. The next one is written completely under another
name and gets its number by a hard link, which fails if the number is taken: of two processes that
add at the same time, one gets `Conflict`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from polybus.errors import Conflict, Damaged
from polybus.spark.archive.archive_folder import OWN, TOPICS, VERSION, ArchiveFolder, sync_folder

DIGITS = 20
KEPT_MANIFESTS = 8  # older ones are kept for inspection


class OffsetSpan(NamedTuple):
    """Offsets `start` to `end` (exclusive) of a shard."""

    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ArchivedFile:
    """A file; `path` is relative to the archive. Times are the bus's, of the first and last row."""

    path: str
    date: str
    size_bytes: int
    first_ns: int
    last_ns: int
    shards: Mapping[int, OffsetSpan]

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.shards.values())

    def as_json(self) -> dict[str, Any]:
        shards = {str(shard): list(span) for shard, span in sorted(self.shards.items())}
        return {**vars(self), "shards": shards}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ArchivedFile:
        shards = {
            int(shard): OffsetSpan(*map(int, span)) for shard, span in given["shards"].items()
        }
        known = {column.name: given[column.name] for column in fields(cls)}
        return cls(**{**known, "shards": shards})


class OffsetGap(NamedTuple):
    """Offsets of a shard that are lost between two files."""

    shard: int
    lost: OffsetSpan
    between: tuple[ArchivedFile, ArchivedFile]


class LastRow(NamedTuple):
    """The last archived row of a shard. It identifies the log that was archived."""

    id: int
    timestamp_ns: int


class ReplacedFile(NamedTuple):
    """A file that compaction replaced. Readers with an older manifest may still read it."""

    path: str
    since_s: int


@dataclass(frozen=True)
class Manifest:
    """The archive of one topic at one time."""

    topic: str
    number: int = 0
    files: tuple[ArchivedFile, ...] = ()
    shards: Mapping[int, OffsetSpan] = field(default_factory=dict)
    lasts: Mapping[int, LastRow] = field(default_factory=dict)
    replaced: tuple[ReplacedFile, ...] = ()

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def end(self, shard: int) -> int | None:
        """Return the archived end of a shard; None if nothing of it is archived."""
        span = self.shards.get(shard)
        return None if span is None else span.end

    def find_files(self, shard: int, start: int, end: int) -> list[ArchivedFile]:
        """Return the files that have some of these rows, in order."""
        return [
            file
            for file in self.files
            if shard in file.shards
            and file.shards[shard].start < end
            and start < file.shards[shard].end
        ]

    def gaps(self) -> Iterator[OffsetGap]:
        """Yield the offsets that were lost before they were archived."""
        last: dict[int, ArchivedFile] = {}
        for file in self.files:
            for shard, span in file.shards.items():
                before = last.get(shard, file)
                if before.shards[shard].end < span.start:
                    yield OffsetGap(
                        shard, OffsetSpan(before.shards[shard].end, span.start), (before, file)
                    )
                last[shard] = file

    def added(
        self, files: Iterable[ArchivedFile], lasts: Mapping[int, LastRow], *, gaps: bool = False
    ) -> Manifest:
        """Return the next manifest with these files. Raises `Conflict` if they do not follow."""
        # The day first: times of a shard never go back, but today's file may begin with a lower
        # shard than yesterday's file that the same task wrote.
        new = sorted(
            files,
            key=lambda file: (file.date, min((n, span.start) for n, span in file.shards.items())),
        )
        shards = dict(self.shards)
        for file in new:
            for shard, span in file.shards.items():
                known = shards.setdefault(shard, OffsetSpan(span.start, span.start))
                end, start = known.end, span.start
                if start != end and not (gaps and start > end):
                    raise Conflict(
                        f"topic {self.topic!r}, shard {shard} is archived up to {end}, and the "
                        f"batch begins at {start}: another run adds to this archive, or the "
                        "checkpoint belongs to another one"
                    )
                shards[shard] = OffsetSpan(known.start, max(known.end, span.end))
        return replace(
            self,
            number=self.number + 1,
            files=(*self.files, *new),
            shards=shards,
            lasts={**self.lasts, **lasts},
        )

    def compacted(self, old: Sequence[ArchivedFile], new: ArchivedFile, now_s: float) -> Manifest:
        """Return the next manifest with one file in place of contiguous ones of its date."""
        paths = {file.path for file in old}
        files = [new if file == old[0] else file for file in self.files]
        gone = tuple(ReplacedFile(file.path, int(now_s)) for file in old)
        return replace(
            self,
            number=self.number + 1,
            files=tuple(file for file in files if file.path not in paths),
            replaced=(*self.replaced, *gone),
        )

    def without_replaced(self, kept: Collection[str]) -> Manifest:
        """Return the next manifest with only these of the replaced files."""
        replaced = tuple(file for file in self.replaced if file.path in kept)
        return replace(self, number=self.number + 1, replaced=replaced)

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "topic": self.topic,
            "number": self.number,
            "shards": {
                str(n): {**span._asdict(), **self.lasts[n]._asdict()}
                for n, span in sorted(self.shards.items())
            },
            "files": [file.as_json() for file in self.files],
            "replaced": [file._asdict() for file in self.replaced],
        }

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Manifest:
        try:
            shards = {int(n): shard for n, shard in given["shards"].items()}
            return cls(
                given["topic"],
                given["number"],
                tuple(map(ArchivedFile.parse, given["files"])),
                {n: OffsetSpan(shard["start"], shard["end"]) for n, shard in shards.items()},
                {n: LastRow(shard["id"], shard["timestamp_ns"]) for n, shard in shards.items()},
                tuple(ReplacedFile(file["path"], file["since_s"]) for file in given["replaced"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"a manifest of the archive is damaged: {error!r}") from None


def list_archived_topics(folder: ArchiveFolder) -> list[str]:
    """Return the topics of which something is archived."""
    newest = map(_newest, (folder.path / OWN / TOPICS).glob("*/"))
    return sorted(manifest.topic for manifest in newest if manifest is not None)


def read_manifest(folder: ArchiveFolder, topic: str) -> Manifest:
    """Return the newest manifest of a topic, an empty one if nothing is archived."""
    return _newest(folder.manifests(topic)) or Manifest(topic)


def _newest(folder_path: Path) -> Manifest | None:
    while True:
        numbers = _numbers(folder_path)
        if not numbers:
            return None
        path = _path(folder_path, numbers[-1])
        try:
            return Manifest.parse(json.loads(path.read_text()))
        except FileNotFoundError:
            continue  # a newer manifest replaced it after the listing
        except ValueError as error:
            raise Damaged(f"{path} is not a manifest: {error}") from None


def commit_manifest(folder: ArchiveFolder, manifest: Manifest) -> None:
    """Make a manifest the newest. Raises `Conflict` if another one has its number."""
    folder_path = folder.manifests(manifest.topic)
    folder_path.mkdir(parents=True, exist_ok=True)
    draft = folder_path / f".{os.getpid()}.new"
    try:
        with draft.open("w") as file:
            json.dump(manifest.as_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        # The draft is synced before it gets its number: a numbered manifest is always complete.
        os.link(draft, _path(folder_path, manifest.number))
    except FileExistsError:
        raise Conflict(
            f"another process adds to the archive of topic {manifest.topic!r}: stop one of them"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(folder_path)
    for number in _numbers(folder_path)[:-KEPT_MANIFESTS]:
        _path(folder_path, number).unlink(missing_ok=True)


def _numbers(folder_path: Path) -> list[int]:
    try:
        names = [path.name for path in folder_path.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name[:DIGITS]) for name in names if name[:DIGITS].isdigit())


def _path(folder_path: Path, number: int) -> Path:
    return folder_path / f"{number:0{DIGITS}}.json"
