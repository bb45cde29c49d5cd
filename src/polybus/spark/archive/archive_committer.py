"""Archive commits by the driver: the files of a batch join the archive in one step per topic."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from polybus.errors import Conflict, Damaged
from polybus.spark.archive.archive_folder import ArchiveFolder, TopicLocks, explain_write_errors
from polybus.spark.archive.manifest import LastRow, Manifest, commit_manifest, read_manifest
from polybus.spark.archive.parquet_files import WrittenFile
from polybus.spark.source.log_access import LogAccess

# How long an unlisted file is kept: a reader may use an older manifest.
KEEP_S = 86_400
TIDY_EVERY_S = 3600  # a run may last for months


class ArchiveCommitter:
    """Adds files to an archive during one run. With `gaps`, offsets that the log has lost are
    skipped.
    """

    def __init__(self, folder: ArchiveFolder, *, gaps: bool = False) -> None:
        self._folder = folder
        self._gaps = gaps
        self.locks = TopicLocks(folder)
        self._tidied_s: dict[str, float] = {}
        self.rows = self.size_bytes = 0

    def begin(self, topic: str, access: LogAccess) -> None:
        """Lock a topic, check that its log is the archived one, and remove unlisted files."""
        self.locks.take(topic)
        check_same_log(access, read_manifest(self._folder, topic))
        self._tidy(topic)

    def add(self, written: Iterable[WrittenFile]) -> list[str]:
        """Commit the files of a batch, topic by topic. Returns the topics that have grown.

        Raises `Damaged` if the driver does not see a task's file.
        """
        by_topic: dict[str, list[WrittenFile]] = defaultdict(list)
        for new in written:
            path = self._folder.path / new.file.path
            if not path.is_file() or path.stat().st_size != new.file.size_bytes:
                raise Damaged(
                    f"{path} is not the file that its task wrote: the archive must be one folder "
                    "shared by the driver and all tasks"
                )
            by_topic[new.topic].append(new)
        for topic, of_topic in sorted(by_topic.items()):
            self.locks.take(topic)
            # A shard's last row decides later whether a log is the archived one (check_same_log).
            lasts: dict[int, LastRow] = {}
            for new in of_topic:
                for shard, last in new.lasts.items():
                    lasts[shard] = max(last, lasts.get(shard, last))
            files = [new.file for new in of_topic]
            with explain_write_errors(self._folder.path):
                manifest = read_manifest(self._folder, topic)
                commit_manifest(self._folder, manifest.added(files, lasts, gaps=self._gaps))
            self.rows += sum(file.rows for file in files)
            self.size_bytes += sum(file.size_bytes for file in files)
            self._tidy(topic)
        return sorted(by_topic)

    def _tidy(self, topic: str) -> None:
        now_s = time.time()
        if now_s - self._tidied_s.get(topic, 0.0) >= TIDY_EVERY_S:
            self._tidied_s[topic] = now_s
            with explain_write_errors(self._folder.path):
                remove_unlisted(self._folder, topic, now_s)


def check_same_log(access: LogAccess, manifest: Manifest) -> None:
    """Raise `Conflict` if the log is not the archived one.

    The log must not end before the archive, and must have the archive's last row if it was not
    trimmed. Equal offsets of another log would be other messages.
    """
    if not manifest.shards:
        return
    log_shards = access.shards(manifest.topic)
    for shard, span in manifest.shards.items():
        log = log_shards.get(shard)
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
        f"topic {topic!r} of this bus is not the archived topic ({why}): "
        "give another folder, or another bus"
    )


def remove_unlisted(folder: ArchiveFolder, topic: str, now_s: float) -> None:
    """Remove files that the manifest does not list and that no reader can need."""
    manifest = read_manifest(folder, topic)
    listed = {file.path for file in manifest.files}
    # A replaced file has an old mtime but may still be read, so its own time counts.
    kept = {file.path for file in manifest.replaced if file.since_s > now_s - KEEP_S}
    for path in folder.data(topic).glob("date=*/*.parquet"):
        name = str(path.relative_to(folder.path))
        is_old = path.stat().st_mtime < now_s - KEEP_S
        if name not in listed and name not in kept and is_old:
            path.unlink()
    if len(kept) < len(manifest.replaced):
        commit_manifest(folder, manifest.without_replaced(kept))
