"""The folder of an archive: its layout, its version, and locks on its topics.

One process at a time adds to a topic. The kernel releases a lock when its process ends. On other
machines and on network file systems without locks, the numbers of manifests still allow only one
writer to continue.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from io import TextIOWrapper
from pathlib import Path
from urllib.parse import quote

from polybus.errors import ConfigError, DataFolderInUse, StoreFull, WrongFormat

FORMAT, VERSION = "polybus archive", 1
MARK = "polybus-archive.json"
OWN = "_polybus"  # Spark and other readers ignore names that begin with _
TOPICS, CHECKPOINTS = "topics", "checkpoints"
LONGEST, HASH = 200, 32  # characters of a file's name; the limit of file systems is 255 bytes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
LOCK_FILE = "lock"


class ArchiveFolder:
    """Paths in an archive. Pickled and sent to tasks, which must see the same folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def check(self) -> None:
        """Raise `WrongFormat` if the folder is not an archive of this version."""
        try:
            mark = json.loads((self.path / MARK).read_text())
        except FileNotFoundError:
            raise WrongFormat(
                f"{self.path} is not an archive: {MARK} is missing; "
                "polybus pipeline archive creates an archive in an empty folder"
            ) from None
        except (ValueError, OSError) as error:
            raise WrongFormat(f"{self.path} is not an archive: {MARK}: {error}") from None
        if not isinstance(mark, dict) or mark.get("format") != FORMAT:
            raise WrongFormat(f"{self.path} is not an archive: {MARK} has another format")
        if mark.get("version") != VERSION:
            raise WrongFormat(
                f"{self.path} is an archive of version {mark.get('version')}, this polybus "
                f"supports version {VERSION}: use the polybus that wrote it, or another folder"
            )

    def prepare(self) -> None:
        """Make the folder an archive if it is empty or missing, and check that it is writable."""
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / MARK).exists():
                if any(self.path.iterdir()):
                    raise WrongFormat(
                        f"{self.path} is not an archive and not empty: give an empty folder"
                    )
                write_durably(self.path / MARK, json.dumps({"format": FORMAT, "version": VERSION}))
            self.check()
            (self.path / OWN).mkdir(exist_ok=True)
            # Fail now rather than in a task if the folder is read-only.
            probe = self.path / OWN / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()

    def manifests(self, topic: str) -> Path:
        return self.path / OWN / TOPICS / quote_name(topic)

    def data(self, topic: str) -> Path:
        return self.path / f"topic={quote_name(topic)}"

    def checkpoint(self, topics: str) -> Path:
        return self.path / OWN / CHECKPOINTS / quote_name(topics)


def quote_name(name: str) -> str:
    """Return a name for a file. A long name is cut and made unique by its hash."""
    text = quote(name, safe="")
    text = "%2E" + text[1:] if text.startswith(".") else text
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - HASH - 1]}~{sha256(name.encode()).hexdigest()[:HASH]}"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise errors of the file system as polybus errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreFull(
                f"the disk of {path} is full: free space and start again; finished work is kept, "
                "and the run continues from there"
            ) from None
        if error.errno in NOT_ALLOWED:
            raise ConfigError(f"{path} is not writable: {error.strerror}") from None
        if isinstance(error, NotADirectoryError | FileExistsError):
            raise ConfigError(f"{path} is not a folder: {error.strerror}") from None
        raise


def write_durably(path: Path, text: str) -> None:
    """Write a file so that it is on disk completely or not at all, also after a power failure."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TopicLocks:
    """The locks of one run on its topics."""

    def __init__(self, folder: ArchiveFolder) -> None:
        self._folder = folder
        self._held: dict[str, TextIOWrapper] = {}

    def take(self, topic: str) -> None:
        """Lock a topic. Raises `DataFolderInUse` if another process holds the lock."""
        if topic in self._held:
            return
        with explain_write_errors(self._folder.path):
            folder = self._folder.manifests(topic)
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / LOCK_FILE).open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "another process"
                file.close()
                raise DataFolderInUse(
                    f"topic {topic!r} is being archived to {self._folder.path} by {owner}: "
                    "stop that process, or use another folder"
                ) from None
            # Only for error messages; the lock itself is the flock.
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            self._held[topic] = file

    @property
    def held(self) -> list[str]:
        return sorted(self._held)

    def release(self) -> None:
        for file in self._held.values():
            file.close()
        self._held.clear()
