"""Where a store lives: its folder, its ownership, and the environment now in use.

The owner changes the environment when it compacts, or when LMDB has given one up after
a failed write. A reader looks at CURRENT before each read and follows.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lmdb

from polybus.errors import Damaged, DoesNotExist, PolybusError, StoreClosed, WrongFormat
from polybus.store.lmdb import (
    environment,
    folder_ownership,
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

CurrentVersion = tuple[int, int]  # tells one CURRENT from another


def current_generation(path: Path) -> Path:
    """The sub-folder in use. `DoesNotExist` if there is no store, `WrongFormat` if not ours."""
    try:
        text = (path / CURRENT).read_text()
    except FileNotFoundError:
        raise DoesNotExist(f"there is no store in {path}") from None
    except UnicodeDecodeError:
        text = ""
    title, _, name = text.strip().partition("\n")
    kind, _, version = title.rpartition(" ")
    if kind != _TITLE or not _GENERATION.fullmatch(name):
        raise WrongFormat(f"{path / CURRENT} was not written by polybus")
    if version != str(FORMAT_VERSION):
        raise WrongFormat(f"{path} has format {version}, this polybus reads {FORMAT_VERSION}")
    return path / name


def current_version(path: Path) -> CurrentVersion:
    """Changes whenever another generation comes into use."""
    found = os.stat(path / CURRENT)  # noqa: PTH116 -- before each read, and twice as quick
    return found.st_ino, found.st_mtime_ns


def prepare(path: Path, fill: Callable[[Path], None]) -> Path:
    """The sub-folder in use, made if there is none. Only the owner may call this.

    `fill` makes an environment in a folder. All names are on disk when this returns, also
    those that an owner made who was killed before he could see to it.
    """
    if not (path / CURRENT).exists():
        found = _generations(path)
        if len(found) > 1:
            raise Damaged(f"{path / CURRENT} is missing, and there are {len(found)} generations")
        switch_generation(path, found[0] if found else _create_first(path, fill))
    used = current_generation(path)
    for other in _generations(path):
        if other != used:
            shutil.rmtree(other, ignore_errors=True)
    sync_folder(used)
    sync_folder(path)
    return used


def _create_first(path: Path, fill: Callable[[Path], None]) -> Path:
    """The first generation: whole on disk before it goes by its name.

    LMDB writes a new file's first pages without a sync, and never syncs its folder: a cut
    of power would leave what is no LMDB file, or none, where CURRENT says there is one.
    """
    fresh, first = path / "0001.new", path / "0001"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    fill(fresh)
    sync_folder(fresh)
    return fresh.rename(first)


def next_generation(used: Path) -> Path:
    """An empty sub-folder for the generation after this one."""
    path = used.with_name(f"{int(used.name) + 1:04d}")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def switch_generation(path: Path, used: Path) -> None:
    """Makes a sub-folder, whose files are on disk already, the one in use."""
    sync_folder(used)
    fresh = path / (CURRENT + ".new")
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
        with fresh.open("w") as file:
            file.write(f"{_TITLE} {FORMAT_VERSION}\n{used.name}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path / CURRENT)
        os.fsync(directory)  # opened before: it must not lack a descriptor now
    finally:
        os.close(directory)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """The folder itself, its name on disk as well."""
    missing = [one for one in (path, *path.parents) if not one.is_dir()]
    path.mkdir(parents=True, mode=0o700, exist_ok=True)
    for one in reversed(missing):
        sync_folder(one.parent)


def _generations(path: Path) -> list[Path]:
    found = [entry for entry in path.iterdir() if _GENERATION.fullmatch(entry.name)]
    return sorted(entry for entry in found if entry.is_dir())


class StoreFiles:
    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._lock = threading.Lock()
        self._closed = False
        self._used: Environment
        if read_only:
            current_generation(path)
            self._open_current()
        else:
            self._take_ownership()

    @property
    def current(self) -> Environment:
        return self._used

    def snapshot(self) -> ReadSnapshot:
        """A short look: views of what is stored must not outlive it."""
        return ReadSnapshot(self)

    @contextmanager
    def hold_environment(self) -> Iterator[Environment]:
        """The environment in use, which stays open for the time."""
        used = self.enter()
        try:
            yield used
        finally:
            environment.leave(used)

    def enter(self) -> Environment:
        """The environment in use, which stays open until `environment.leave`."""
        if self.read_only:
            self._follow()
        return self._enter_current()

    def move_to(self, generation: Path) -> None:
        """A new generation, complete on disk, is the one in use from now on.

        It is opened first: what is written after CURRENT names it must go nowhere else.
        """
        with self._lock:
            before, named = self._used, current_version(self.path)
            self._open(generation)
            try:
                switch_generation(self.path, generation)
            except BaseException:
                named_before = current_version(self.path) == named
                environment.release(self._used if named_before else before)
                self._used = before if named_before else self._used
                raise
        environment.release(before)
        shutil.rmtree(before.path, ignore_errors=True)

    def reopen(self) -> None:
        """The same environment anew; waits for those who read in it."""
        environment.reopen(self._used)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        environment.release(self._used)
        if not self.read_only:
            folder_ownership.release(self.path)

    def _enter_current(self) -> Environment:
        while not (used := self._used).enter():
            with self._lock:  # it is being changed
                if used is self._used:
                    raise StoreClosed(f"{self.path} was closed")
        return used

    def _take_ownership(self) -> None:
        with translated_errors():
            make_folder(self.path)
            folder_ownership.take(self.path)
        try:
            with translated_errors():
                used = prepare(self.path, _create_environment)
            self._open(used)
            self._used.clear_dead_readers()
        except BaseException:
            folder_ownership.release(self.path)
            raise

    def _open(self, generation: Path) -> None:
        opened = environment.acquire(generation, read_only=self.read_only)
        try:
            self._check_format(opened)
        except BaseException:
            environment.release(opened)
            raise
        self._used = opened

    def _open_current(self) -> None:
        """What CURRENT names; if that changes meanwhile, what it names then."""
        with translated_errors():
            while True:
                seen = current_version(self.path)
                generation = current_generation(self.path)
                try:
                    self._open(generation)
                except PolybusError:
                    if current_version(self.path) == seen:
                        raise
                else:
                    self._seen = seen
                    return

    def _check_format(self, opened: Environment) -> None:
        with translated_errors(), opened.read_transaction() as transaction:
            found = transaction.get(store_keys.FORMAT)
            version = None if found is None else stored_values.read_number(found)
        if version != stored_values.FORMAT_VERSION:
            raise WrongFormat(
                f"{self.path} has format {version}, not {stored_values.FORMAT_VERSION}"
            )

    def _follow(self) -> None:
        try:
            same = current_version(self.path) == self._seen
        except FileNotFoundError:
            return
        if not same:
            with self._lock:
                if self._closed:
                    raise StoreClosed(f"{self.path} was closed")
                before = self._used
                self._open_current()
            environment.release(before)


class ReadSnapshot:
    """A transaction to read in, for the length of a `with`.

    A class, since every read begins here: generators in each other took as long as the rest.
    """

    __slots__ = ("_files", "_transaction", "_used")

    def __init__(self, files: StoreFiles) -> None:
        self._files = files

    def __enter__(self) -> Transaction:
        used = self._used = self._files.enter()
        try:
            self._transaction = used.begin()
        except BaseException:
            environment.leave(used)
            raise
        return self._transaction

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._used.end(self._transaction)
        finally:
            environment.leave(self._used)
        if isinstance(error, lmdb.Error | OSError):
            raise translate_error(error) from error


def _create_environment(path: Path) -> None:
    """A new environment, with its format written and on disk."""
    opened = environment.acquire(path, read_only=False)
    try:
        with translated_errors(), opened.lmdb.begin(write=True) as transaction:
            transaction.put(
                store_keys.FORMAT, stored_values.encode_number(stored_values.FORMAT_VERSION)
            )
    finally:
        environment.release(opened)
