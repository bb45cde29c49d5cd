"""The interface of an engine: opens stores and, if it keeps files, maintains them.

An engine registers a subclass of `StoreEngine` under its URL scheme in the entry-point group
`polybus.engines`; `polybus.store.engine_registry` finds it there. The module that the
entry point names should import the code of the store only when a method is called,
because the registry loads every engine to look for files or for the default.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from polybus.store.contract import Progress, Store, no_progress

Durability = Literal["fsync", "interval"]

COMMIT_INTERVAL_MS = 50  # with "interval", a crash may lose the commits of this time
MAX_LISTED = 1000  # lines of a report: a ruined disk must not fill memory with them


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of `StoreEngine.open`. An engine ignores the ones that do not apply to it."""

    read_only: bool = False
    durability: Durability = "fsync"
    commit_interval_ms: int = COMMIT_INTERVAL_MS
    wall_ns: Callable[[], int] = time.time_ns


class StoreFileInfo(NamedTuple):
    """Sizes and users of a store's file.

    `used_bytes` hold data. `free_bytes` are reused before the file grows.
    """

    format: int
    generation: str
    file_bytes: int
    used_bytes: int
    free_bytes: int
    readers: int
    owner_pid: int | None


@dataclass
class VerifyReport:
    """Totals of a verification, and its faults, of which at most `MAX_LISTED` are listed."""

    topics: int = 0
    shards: int = 0
    blocks: int = 0
    messages: int = 0
    bytes: int = 0
    fault_count: int = 0
    faults: tuple[str, ...] = field(default_factory=tuple)

    def add(self, fault: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MAX_LISTED:
            self.faults = (*self.faults, fault)


class SalvageReport(NamedTuple):
    """Totals of a salvage, and the losses it detected, of which `MAX_LISTED` are listed."""

    topics: int
    blocks: int
    messages: int
    bytes: int
    lost: tuple[str, ...]


class Maintenance(ABC):
    """Operations on the files of a store that this process does not have open.

    All but `compact` and `salvage` must work while another process owns the store.
    `progress` is called with the bytes done and the total, at any rate and on any thread.
    """

    @abstractmethod
    def recognises(self, folder: Path, *, damaged: bool = False) -> bool:
        """Return True if the folder holds a store of this engine.

        If `damaged`, data that `salvage` can search is enough.
        """

    @abstractmethod
    def info(self, folder: Path) -> StoreFileInfo:
        """Return the sizes and users of the store's file."""

    @abstractmethod
    def verify(self, folder: Path, progress: Progress = no_progress) -> VerifyReport:
        """Read all of the store and report damage.

        Raises `DoesNotExist` if there is no store and `WrongFormat` if its format is unknown.
        """

    @abstractmethod
    def backup(self, folder: Path, target: Path, progress: Progress = no_progress) -> int:
        """Copy the store to a missing or empty folder. Returns the bytes written.

        Raises `UsageError` if the target is not empty. Removes the copy if it fails.
        """

    @abstractmethod
    def restore(self, folder: Path, target: Path, progress: Progress = no_progress) -> int:
        """Create a store in a missing or empty folder from a backup. Returns the bytes written."""

    @abstractmethod
    def compact(self, folder: Path, progress: Progress = no_progress) -> tuple[int, int]:
        """Return free space to the file system. Returns the file's bytes before and after.

        Raises `DataFolderInUse` if another process owns the store.
        """

    @abstractmethod
    def salvage(
        self, folder: Path, target: Path, progress: Progress = no_progress
    ) -> SalvageReport:
        """Copy the intact messages of a damaged store to a missing or empty folder.

        Raises `DataFolderInUse` if a process owns the store.
        """


class StoreEngine(ABC):
    """One kind of store, registered under a URL scheme. The URL is `scheme:place`."""

    # A bus whose configuration names no engine uses the engine that sets this.
    is_default: bool = False
    # None if the engine keeps no files that can be maintained without the store.
    maintenance: Maintenance | None = None

    @abstractmethod
    def open(self, place: str, options: StoreOptions) -> Store:
        """Open the store at a place, created if it is missing and `read_only` is not set.

        Raises `AddressError` if the place is invalid.
        """

    def absolute(self, place: str) -> str:
        """Return the place in a form that does not depend on the working directory."""
        return place

    def canonical(self, place: str) -> str:
        """Return the same text for all places that name the same store."""
        return self.absolute(place)

    def default_place(self, data: Path) -> str:
        """Return the place of a bus's store within the data folder of the bus."""
        return str(data / "store")
