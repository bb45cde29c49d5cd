"""The folder of an archive: where things are in it, and whether it is one.

One archive of a topic at a time, on one folder.

The kernel gives a lock back when its process ends, however it ends. Where it does not reach
(other machines, some network disks) the numbers of manifests still let only one go on.
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
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from polybus.errors import ConfigError, DataFolderInUse, StoreFull, WrongFormat

if TYPE_CHECKING:
    from io import TextIOWrapper

FORMAT, VERSION = "polybus archive", 1
MARK = "polybus-archive.json"
OWN = "_polybus"  # Spark and others pass over what begins so
TOPICS, CHECKPOINTS = "topics", "checkpoints"
LONGEST, HASH = 200, 32  # characters of a name in a folder, which may have 255 bytes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
NAME = "lock"


class ArchiveFolder:
    """Pickled, and sent to tasks: it must be the same folder wherever they run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def check(self) -> None:
        """`WrongFormat` if it is no archive, or one of another version."""
        try:
            found = json.loads((self.path / MARK).read_text())
        except FileNotFoundError:
            raise WrongFormat(
                f"{self.path} is no archive: there is no {MARK}; "
                "polybus pipeline archive makes one in an empty folder"
            ) from None
        except (ValueError, OSError) as error:
            raise WrongFormat(f"{self.path} is no archive: {MARK}: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise WrongFormat(f"{self.path} is no archive: {MARK} is of something else")
        if found.get("version") != VERSION:
            raise WrongFormat(
                f"{self.path} is an archive of version {found.get('version')}, and this polybus "
                f"has version {VERSION}: use the polybus that wrote it, or another folder"
            )

    def prepare(self) -> None:
        """Makes it an archive, if it is empty or not there."""
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / MARK).exists():
                if any(self.path.iterdir()):
                    raise WrongFormat(
                        f"{self.path} is no archive, and not empty: give an empty folder, or none"
                    )
                write_durably(self.path / MARK, json.dumps({"format": FORMAT, "version": VERSION}))
            self.check()
            (self.path / OWN).mkdir(exist_ok=True)
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
    """As the name of a file; one that is too long for that is cut, and told apart by its hash."""
    text = quote(name, safe="")
    text = "%2E" + text[1:] if text.startswith(".") else text
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - HASH - 1]}~{sha256(name.encode()).hexdigest()[:HASH]}"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """What the disk refuses is told as what it is, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreFull(
                f"the disk of {path} is full: make room and start again, what is done stays, "
                "and the rest goes on from there"
            ) from None
        if error.errno in NOT_ALLOWED:
            raise ConfigError(f"{path} is not writable: {error.strerror}") from None
        if isinstance(error, NotADirectoryError | FileExistsError):
            raise ConfigError(f"{path} is no folder: {error.strerror}") from None
        raise


def write_durably(path: Path, text: str) -> None:
    """All of it is on disk under this name, or nothing is."""
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
    """The names in a folder are on disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TopicLocks:
    """Of one run, over all its topics."""

    def __init__(self, folder: ArchiveFolder) -> None:
        self._folder = folder
        self._held: dict[str, TextIOWrapper] = {}

    def take(self, topic: str) -> None:
        """`DataFolderInUse` if another one has it."""
        if topic in self._held:
            return
        with explain_write_errors(self._folder.path):
            self._held[topic] = self._locked(topic)

    @property
    def held(self) -> list[str]:
        return sorted(self._held)

    def release(self) -> None:
        for file in self._held.values():
            file.close()
        self._held.clear()

    def _locked(self, topic: str) -> TextIOWrapper:
        place = self._folder.manifests(topic)
        place.mkdir(parents=True, exist_ok=True)
        file = (place / NAME).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise DataFolderInUse(
                f"topic {topic!r} is being archived to {self._folder.path} by {owner}: "
                "end that one, or use another folder"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file
