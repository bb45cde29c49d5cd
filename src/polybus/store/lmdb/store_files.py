"""The files of a store: its folder, its owner, and the current LMDB environment.

    PATH/owner.lock     locked by the process that writes (`folder_ownership`)
    PATH/CURRENT        "polybus store <format>", and the name of a sub-folder
    PATH/0001/          a generation: an LMDB environment with data.mdb and lock.mdb

A file is on disk before another file names it. LMDB syncs its data, but neither the names
of its files nor the first pages of a new one, so this module does.

Compaction writes the next generation and then replaces CURRENT, which is atomic. Readers
check CURRENT before each read and follow it. The next owner removes generations that
CURRENT does not name, which are left by a compaction that did not finish. Other files in
PATH are not touched. The owner also reopens the environment when LMDB has given it up after
a failed write.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lmdb

from polybus.errors import Damaged, DoesNotExist, PolybusError, StoreClosed, WrongFormat
from polybus.store import folder_ownership
from polybus.store.folder_names import make_folder, sync_folder
from polybus.store.lmdb import (
    data_file,
    environment,
    store_keys,
    stored_values,
)
from polybus.store.lmdb.environment import Environment, Transaction
from polybus.store.lmdb.lmdb_errors import translate_error, translated_errors
from polybus.store.lmdb.stored_values import FORMAT_VERSION

CURRENT: Final = "CURRENT"
DATA: Final = "data.mdb"
_TITLE: Final = "polybus store"
_GENERATION = re.compile(r"\d{4,}")

CurrentVersion = tuple[int, int]  # inode and time: differ between two versions of CURRENT


def current_generation(path: Path) -> Path:
    """Return the current generation.

    Raises `DoesNotExist` if there is no store, `WrongFormat` if CURRENT is not readable.
    """
    try:
        text = (path / CURRENT).read_text()
    except FileNotFoundError:
        raise DoesNotExist(f"no store in {path}") from None
    except UnicodeDecodeError:
        text = ""
    title, _, name = text.strip().partition("\n")
    kind, _, version = title.rpartition(" ")
    # The name is used as a path, so it must not lead outside of the folder.
    if kind != _TITLE or not _GENERATION.fullmatch(name):
        raise WrongFormat(f"{path / CURRENT} was not written by polybus")
    if version != str(FORMAT_VERSION):
        raise WrongFormat(
            f"{path} has format {version}; this version of polybus reads {FORMAT_VERSION}"
        )
    return path / name


def current_version(path: Path) -> CurrentVersion:
    """Return a value that changes whenever another generation becomes current."""
    found = os.stat(path / CURRENT)  # noqa: PTH116 -- once per read; Path takes twice as long
    return found.st_ino, found.st_mtime_ns


def prepare(path: Path) -> Path:
    """Return the current generation, created if there is none. Only the owner may call this.

    When this returns, all names are on disk, also those of a former owner that was killed
    before it synced them.
    """
    if not (path / CURRENT).exists():
        found = _generations(path)
        # One generation without CURRENT is a creation that was interrupted before its last step.
        # With several, the current one is unknown, and guessing could lose commits.
        if len(found) > 1:
            raise Damaged(
                f"{path / CURRENT} is missing, and {len(found)} generations exist; use salvage"
            )
        switch_generation(path, found[0] if found else _create_first(path))
    used = current_generation(path)
    # Safe, because the caller owns the folder and CURRENT is on disk.
    for other in _generations(path):
        if other != used:
            shutil.rmtree(other, ignore_errors=True)
    sync_folder(used)
    sync_folder(path)
    return used


def _create_first(path: Path) -> Path:
    """Create the first generation, complete on disk before it gets its name.

    LMDB writes the first pages of a new file without a sync and never syncs its folder.
    After a power cut, CURRENT could otherwise name a missing or broken file.
    """
    fresh = path / "0001.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    opened = environment.acquire(fresh, read_only=False)
    try:
        # This transaction syncs the file.
        with opened.lmdb.begin(write=True) as transaction:
            transaction.put(store_keys.FORMAT, stored_values.encode_number(FORMAT_VERSION))
    finally:
        environment.release(opened)
    sync_folder(fresh)
    return fresh.rename(path / "0001")


def next_generation(used: Path) -> Path:
    """Create an empty folder for the generation after this one."""
    path = used.with_name(f"{int(used.name) + 1:04d}")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def switch_generation(path: Path, used: Path) -> None:
    """Make a generation current. Its files must be on disk already."""
    sync_folder(used)
    # Written under another name and renamed: CURRENT is never missing or partly written.
    fresh = path / (CURRENT + ".new")
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
        with fresh.open("w") as file:
            file.write(f"{_TITLE} {FORMAT_VERSION}\n{used.name}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path / CURRENT)
        # Opened before the change, so that a lack of descriptors cannot fail it here.
        os.fsync(directory)
    finally:
        os.close(directory)


def _generations(path: Path) -> list[Path]:
    found = [entry for entry in path.iterdir() if _GENERATION.fullmatch(entry.name)]
    return sorted(entry for entry in found if entry.is_dir())


class StoreFiles:
    """The files of one open store: owned, or read while another process may own them."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._lock = threading.Lock()
        self._closed = False
        self.current: Environment
        if read_only:
            current_generation(path)  # raises if there is no store
            self._open_current()
            return
        with translated_errors():
            make_folder(path)
            # Before anything is opened: only the owner may repair or clean up the folder.
            folder_ownership.take(path)
        try:
            with translated_errors():
                used = prepare(path)
            self._open(used)
            self.current.clear_dead_readers()
        except BaseException:
            folder_ownership.release(path)
            raise

    def snapshot(self) -> ReadSnapshot:
        """Open a read transaction. Views of stored values are valid only within it."""
        return ReadSnapshot(self)

    @contextmanager
    def hold_environment(self) -> Iterator[Environment]:
        """Keep the current environment open for the length of the block."""
        used = self.enter()
        try:
            yield used
        finally:
            environment.leave(used)

    def enter(self) -> Environment:
        """Return the current environment, which stays open until `environment.leave`."""
        if self.read_only:
            self._follow()
        # The environment may be closed between the two steps if a compaction replaces it.
        while not (used := self.current).enter():
            with self._lock:  # wait for the change of generation
                if used is self.current:
                    raise StoreClosed(f"{self.path} was closed")
        return used

    def move_to(self, generation: Path) -> None:
        """Make a generation, complete on disk, the current one.

        It is opened before CURRENT is replaced. Once CURRENT names it, a failure to open it
        would let later commits go to the old generation.
        """
        with self._lock:
            before, named = self.current, current_version(self.path)
            self._open(generation)
            try:
                switch_generation(self.path, generation)
            except BaseException:
                # The failure may have come before or after CURRENT was replaced: continue
                # with the generation that it names.
                named_before = current_version(self.path) == named
                environment.release(self.current if named_before else before)
                self.current = before if named_before else self.current
                raise
        environment.release(before)
        # Readers that still have it open keep their mapping; the next owner removes leftovers.
        shutil.rmtree(before.path, ignore_errors=True)

    def reopen(self) -> None:
        """Reopen the environment. Waits until its reads have ended."""
        environment.reopen(self.current)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        environment.release(self.current)
        if not self.read_only:
            folder_ownership.release(self.path)

    def _open(self, generation: Path) -> None:
        with translated_errors():
            data_file.check_length(generation / DATA)
        opened = environment.acquire(generation, read_only=self.read_only)
        try:
            with translated_errors():
                transaction = opened.lmdb.begin(buffers=True)
                try:
                    raw = transaction.get(store_keys.FORMAT)
                    version = None if raw is None else stored_values.read_number(raw)
                finally:
                    transaction.abort()
            if version != FORMAT_VERSION:
                raise WrongFormat(
                    f"{self.path} has format {version}; this version of polybus reads "
                    f"{FORMAT_VERSION}"
                )
        except BaseException:
            environment.release(opened)
            raise
        self.current = opened

    def _open_current(self) -> None:
        """Open the generation that CURRENT names, and retry if CURRENT changes meanwhile."""
        with translated_errors():
            while True:
                seen = current_version(self.path)
                generation = current_generation(self.path)
                try:
                    self._open(generation)
                except PolybusError:
                    # If CURRENT did not change, the error is real; otherwise the owner removed the
                    # generation meanwhile.
                    if current_version(self.path) == seen:
                        raise
                else:
                    self._seen = seen
                    return

    def _follow(self) -> None:
        try:
            # One stat call per read is the whole cost of following the owner.
            same = current_version(self.path) == self._seen
        except FileNotFoundError:
            return
        if not same:
            with self._lock:
                if self._closed:
                    raise StoreClosed(f"{self.path} was closed")
                before = self.current
                self._open_current()
            environment.release(before)


class ReadSnapshot:
    """A read transaction for the length of a `with`.

    This is a class because every read begins here: nested generators doubled its time.
    """

    __slots__ = ("_files", "_transaction", "_used")

    def __init__(self, files: StoreFiles) -> None:
        self._files = files

    def __enter__(self) -> Transaction:
        used = self._used = self._files.enter()
        try:
            self._transaction = used.lmdb.begin(buffers=True)
        except BaseException as error:
            environment.leave(used)
            if isinstance(error, lmdb.Error):
                raise translate_error(error) from error
            raise
        return self._transaction

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # This also closes the cursors of the transaction.
            self._transaction.abort()
        finally:
            environment.leave(self._used)
        if isinstance(error, lmdb.Error | OSError):
            raise translate_error(error) from error
