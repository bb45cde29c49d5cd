"""Where a store lives: its folder, its ownership, and the environment now in use.

The owner changes the environment when it compacts, or when LMDB has given one up after
a failed write. A reader looks at CURRENT before each read and follows.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from polybus.errors import PolybusError, StoreClosed, WrongFormat
from polybus.store.lmdb import (
    environment,
    folder_ownership,
    store_folder,
    store_keys,
    stored_values,
)
from polybus.store.lmdb.environment import Environment, Transaction
from polybus.store.lmdb.lmdb_errors import translate_error, translated_errors


class StoreFiles:
    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._lock = threading.Lock()
        self._closed = False
        self._used: Environment
        if read_only:
            store_folder.current_generation(path)
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
            before, named = self._used, store_folder.current_version(self.path)
            self._open(generation)
            try:
                store_folder.switch_generation(self.path, generation)
            except BaseException:
                named_before = store_folder.current_version(self.path) == named
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
            store_folder.make_folder(self.path)
            folder_ownership.take(self.path)
        try:
            with translated_errors():
                used = store_folder.prepare(self.path, _create_environment)
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
                seen = store_folder.current_version(self.path)
                generation = store_folder.current_generation(self.path)
                try:
                    self._open(generation)
                except PolybusError:
                    if store_folder.current_version(self.path) == seen:
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
            same = store_folder.current_version(self.path) == self._seen
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

    __slots__ = ("_home", "_transaction", "_used")

    def __init__(self, home: StoreFiles) -> None:
        self._home = home

    def __enter__(self) -> Transaction:
        used = self._used = self._home.enter()
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
