"""Copies of a store: backup, compaction, and the figures of its file.

LMDB copies an environment page by page, without free pages, in one read transaction while
the owner continues to write. A backup needs no more than that. Compaction must not miss a
commit, so the writer does it: it commits nothing until the copy is complete on disk and
has become the current generation.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from polybus.errors import UsageError
from polybus.store import folder_ownership
from polybus.store.contract import Progress, no_progress
from polybus.store.engine import StoreFileInfo
from polybus.store.folder_names import make_folder, sync_folder
from polybus.store.lmdb import store_files, stored_values
from polybus.store.lmdb.environment import Environment
from polybus.store.lmdb.lmdb_errors import translated_errors
from polybus.store.lmdb.store_files import StoreFiles

POLL_S: Final = 0.1


def backup(source: Path, target: Path, progress: Progress = no_progress) -> int:
    """Copy a store, which another process may own, to a new folder. Returns the bytes written.

    Raises `UsageError` if the target is not empty. Removes the copy if it fails.
    """
    files = StoreFiles(source, read_only=True)
    try:
        with files.hold_environment() as used:
            return backup_environment(used, target, progress)
    finally:
        files.close()


def compact(path: Path, progress: Progress = no_progress) -> tuple[int, int]:
    """Compact a store that no process owns. Returns the bytes of its file before and after."""
    store_files.current_generation(path)  # raises if there is no store
    files = StoreFiles(path, read_only=False)
    try:
        return compact_files(files, progress)
    finally:
        files.close()


def backup_environment(environment: Environment, target: Path, progress: Progress) -> int:
    """Copy an environment to a new store in a missing or empty folder. Returns the bytes."""
    with translated_errors(), _filling_target(target):
        # Renamed when complete: the next owner takes a lone generation folder for the store.
        fresh = target / "0001.new"
        fresh.mkdir()
        written = copy(environment, fresh, progress)
        store_files.switch_generation(target, fresh.rename(target / "0001"))
        # Make the name of the target itself durable.
        sync_folder(target.absolute().parent)
        return written


def compact_files(files: StoreFiles, progress: Progress) -> tuple[int, int]:
    """Compact the files, as their owner, while no transaction is written.

    Returns the bytes of the file before and after.
    """
    before = files.current
    size = file_bytes(before)
    with translated_errors():
        fresh = store_files.next_generation(before.path)
        try:
            written = copy(before, fresh, progress)
            files.move_to(fresh)
        except BaseException:
            # If CURRENT names the copy already, it must stay.
            if files.current is before:
                shutil.rmtree(fresh, ignore_errors=True)
            raise
    return size, written


def copy(environment: Environment, generation: Path, progress: Progress) -> int:
    """Copy the used pages of an environment to an empty folder, synced. Returns the bytes."""
    path = generation / store_files.DATA
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # LMDB copies in one call, during which other threads run.
        with _reporting_growth(path, used_bytes(environment), progress):
            environment.lmdb.copyfd(descriptor, compact=True)
        # The copy must be on disk before a name or CURRENT refers to it.
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    sync_folder(generation)
    progress(size, size)
    return size


def file_bytes(environment: Environment) -> int:
    return (environment.path / store_files.DATA).stat().st_size


def used_bytes(environment: Environment) -> int:
    """Return the bytes of pages that hold data, without the list of free pages."""
    stat = environment.lmdb.stat()
    # LMDB has two root pages, which its statistics do not count.
    pages = 2 + stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return int(pages * stat["psize"])


@contextmanager
def _reporting_growth(path: Path, total: int, progress: Progress) -> Iterator[None]:
    """Report the growth of a file from a separate thread, because LMDB reports nothing."""
    over = threading.Event()

    def poll() -> None:
        while not over.wait(POLL_S):
            progress(min(path.stat().st_size, total), total)

    thread = threading.Thread(target=poll, name="polybus-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _filling_target(target: Path) -> Iterator[None]:
    """Create the target. If the block raises, remove everything that was put into it."""
    existed = target.is_dir()
    if existed and any(target.iterdir()):
        raise UsageError(f"{target} is not empty")
    make_folder(target)
    try:
        yield
    except BaseException:
        for entry in target.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not existed:
            target.rmdir()
        raise


def read_file_info(path: Path) -> StoreFileInfo:
    """Return the sizes, readers and owner of a store's file."""
    files = StoreFiles(path, read_only=True)
    try:
        used, file = used_bytes(files.current), file_bytes(files.current)
        return StoreFileInfo(
            stored_values.FORMAT_VERSION,
            files.current.path.name,
            file,
            used,
            max(0, file - used),
            _readers(files.current.lmdb.readers()),
            folder_ownership.owner(path),
        )
    finally:
        files.close()


def _readers(table: str) -> int:
    """Count the lines of LMDB's table that begin with a pid; the others are headings."""
    return sum(line.split()[0].isdigit() for line in table.splitlines() if line.strip())
