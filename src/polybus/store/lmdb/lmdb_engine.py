"""The engine of `lmdb:PATH`: a folder that one process owns and others may read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polybus.errors import AddressError
from polybus.store.contract import Progress, no_progress
from polybus.store.engine import Maintenance, StoreEngine

if TYPE_CHECKING:
    from polybus.store.contract import Store
    from polybus.store.engine import SalvageReport, StoreFileInfo, StoreOptions, VerifyReport

CURRENT_FILE = "CURRENT"
DATA_FILES = "[0-9]*/data.mdb"  # left in a store that has lost everything else


class LmdbMaintenance(Maintenance):
    """Maintenance of LMDB stores. Each method imports the code it needs."""

    def recognises(self, folder: Path, *, damaged: bool = False) -> bool:
        return any(folder.glob(DATA_FILES if damaged else CURRENT_FILE))

    def info(self, folder: Path) -> StoreFileInfo:
        from polybus.store.lmdb.store_copy import read_file_info

        return read_file_info(folder)

    def verify(self, folder: Path, progress: Progress = no_progress) -> VerifyReport:
        from polybus.store.lmdb.verification import verify

        return verify(folder, progress)

    def backup(self, folder: Path, target: Path, progress: Progress = no_progress) -> int:
        from polybus.store.lmdb.store_copy import backup

        return backup(folder, target, progress)

    def restore(self, folder: Path, target: Path, progress: Progress = no_progress) -> int:
        from polybus.store.lmdb.store_copy import backup

        return backup(folder, target, progress)  # a backup is a store

    def compact(self, folder: Path, progress: Progress = no_progress) -> tuple[int, int]:
        from polybus.store.lmdb.store_copy import compact

        return compact(folder, progress)

    def salvage(
        self, folder: Path, target: Path, progress: Progress = no_progress
    ) -> SalvageReport:
        from polybus.store.lmdb.salvage import salvage

        return salvage(folder, target, progress)


class LmdbEngine(StoreEngine):
    """Opens the store in a folder."""

    is_default = True
    maintenance: Maintenance = LmdbMaintenance()

    def open(self, place: str, options: StoreOptions) -> Store:
        from polybus.store.lmdb.lmdb_store import LmdbStore

        return LmdbStore(
            _folder(place),
            read_only=options.read_only,
            durability=options.durability,
            commit_interval_ms=options.commit_interval_ms,
            wall_ns=options.wall_ns,
        )

    def absolute(self, place: str) -> str:
        return str(_folder(place).absolute())

    def canonical(self, place: str) -> str:
        folder = _folder(place).resolve()
        inner = Path(self.default_place(folder))
        # The data folder of a bus stands for the store in it, unless it is a store itself.
        is_data = not self.maintenance.recognises(folder) and self.maintenance.recognises(inner)
        return str(inner if is_data else folder)


def _folder(place: str) -> Path:
    if not place:
        raise AddressError("lmdb: must name a folder: lmdb:PATH")
    return Path(place)
