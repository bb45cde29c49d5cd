"""One archive of a topic at a time, on one folder.

The kernel gives a lock back when its process ends, however it ends. Where it does not reach
(other machines, some network disks) the numbers of manifests still let only one go on.
"""

from __future__ import annotations

import fcntl
import os
import socket
from typing import TYPE_CHECKING

from polybus.errors import DataFolderInUse
from polybus.spark.archive.archive_folder import explain_write_errors

if TYPE_CHECKING:
    from io import TextIOWrapper

    from polybus.spark.archive.archive_folder import ArchiveFolder

NAME = "lock"


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
