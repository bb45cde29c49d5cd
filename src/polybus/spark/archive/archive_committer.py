"""What the driver does: the files of a batch become a part of the archive, in one step a topic."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from polybus.errors import Conflict, Damaged
from polybus.spark.archive.archive_folder import TopicLocks, explain_write_errors
from polybus.spark.archive.manifest import commit_manifest, read_manifest

if TYPE_CHECKING:
    from polybus.spark.archive.archive_folder import ArchiveFolder
    from polybus.spark.archive.manifest import LastRow, Manifest
    from polybus.spark.archive.parquet_files import WrittenFile
    from polybus.spark.source.log_access import LogAccess

# How long a file stays that no manifest names: somebody may read it by an older one.
KEEP_S = 86_400
TIDY_EVERY_S = 3600  # for a run that goes on for months


class ArchiveCommitter:
    """One run that adds to an archive. `gaps`: what the log has lost is passed over."""

    def __init__(self, folder: ArchiveFolder, *, gaps: bool = False) -> None:
        self._folder = folder
        self._gaps = gaps
        self._locks = TopicLocks(folder)
        self._tidied_s: dict[str, float] = {}
        self.rows = self.size_bytes = 0

    def begin(self, topic: str, access: LogAccess) -> None:
        """Nobody else adds to this topic from now on; what is left of earlier runs goes."""
        self._locks.take(topic)
        check_same_log(access, read_manifest(self._folder, topic))
        self._tidy(topic)

    def add(self, written: Iterable[WrittenFile]) -> list[str]:
        """The topics that have grown."""
        by_topic: dict[str, list[WrittenFile]] = defaultdict(list)
        for one in written:
            by_topic[one.topic].append(one)
        for topic, files in sorted(by_topic.items()):
            self._add(topic, files)
            self._tidy(topic)
        return sorted(by_topic)

    @property
    def topics(self) -> list[str]:
        """That nobody else adds to now."""
        return self._locks.held

    def end(self) -> None:
        self._locks.release()

    def _add(self, topic: str, written: list[WrittenFile]) -> None:
        self._locks.take(topic)
        for one in written:
            _check_there(self._folder, one)
        lasts: dict[int, LastRow] = {}
        for one in sorted(written, key=lambda one: one.file.last_ns):
            for shard, last in one.lasts.items():
                lasts[shard] = max(last, lasts.get(shard, last))
        files = [one.file for one in written]
        with explain_write_errors(self._folder.path):
            manifest = read_manifest(self._folder, topic)
            commit_manifest(self._folder, manifest.added(files, lasts, gaps=self._gaps))
        self.rows += sum(one.rows for one in files)
        self.size_bytes += sum(one.size_bytes for one in files)

    def _tidy(self, topic: str) -> None:
        now_s = time.time()
        if now_s - self._tidied_s.get(topic, 0.0) >= TIDY_EVERY_S:
            self._tidied_s[topic] = now_s
            with explain_write_errors(self._folder.path):
                remove_unlisted(self._folder, topic, now_s)


def check_same_log(access: LogAccess, manifest: Manifest) -> None:
    """`Conflict` if a log is not the one that was archived: offsets of another mean other rows."""
    if not manifest.shards:
        return
    there = access.shards(manifest.topic)
    for shard, span in manifest.shards.items():
        log = there.get(shard)
        if log is not None and log.end < span.end:
            _raise_other_log(
                manifest.topic, f"shard {shard} ends at {log.end}, archived up to {span.end}"
            )
        if log is None or span.end <= log.start:
            continue
        for rows in access.read(manifest.topic, shard, span.end - 1, span.end):
            last = rows.column("id")[0].as_py(), rows.column("timestamp_ns")[0].as_py()
            if last != manifest.lasts[shard]:
                _raise_other_log(
                    manifest.topic, f"shard {shard} has another message at {span.end - 1}"
                )


def _raise_other_log(topic: str, why: str) -> None:
    raise Conflict(
        f"topic {topic!r} of this bus is not the one that is in the archive ({why}): "
        "give another folder, or the right bus"
    )


def _check_there(folder: ArchiveFolder, written: WrittenFile) -> None:
    path = folder.path / written.file.path
    if not path.is_file() or path.stat().st_size != written.file.size_bytes:
        raise Damaged(
            f"{path} is not as its task wrote it: the archive must be one folder for the driver "
            "and all tasks"
        )


def remove_unlisted(folder: ArchiveFolder, topic: str, now_s: float) -> None:
    """Removes files that do not count, and that nobody can be reading any more."""
    manifest = read_manifest(folder, topic)
    counts = {one.path for one in manifest.files}
    kept = {one.path for one in manifest.replaced if one.since_s > now_s - KEEP_S}
    for path in folder.data(topic).glob("date=*/*.parquet"):
        name = str(path.relative_to(folder.path))
        is_old = path.stat().st_mtime < now_s - KEEP_S
        if name not in counts and name not in kept and is_old:
            path.unlink()
    if len(kept) < len(manifest.replaced):
        commit_manifest(folder, manifest.without_replaced(kept))
