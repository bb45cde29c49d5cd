"""`polybus store info|verify|salvage|compact|backup|restore`: the files of a store.

polybus store verify /var/lib/polybus
polybus store backup lmdb:/srv/bus /mnt/backup/bus-monday

A store is named by its engine's URL, its folder, or the data folder of a bus. The
commands work on the files themselves, beside a bus that holds them or without one;
only `compact` asks the bus to do it if there is one. Each answers with one line of
what was done, or `--json`; exit code 0, 1 if damage was found, 2 if it cannot be done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polybus.cli import flags
from polybus.cli.progress_bar import format_size, show_progress
from polybus.cli.store_location import DATA, check_new_folder, find_store_folder

DAMAGE_FOUND = 1
# Rewriting a store of terabytes takes hours; a bus that is gone is noticed at once anyway.
COMPACT_TIMEOUT_S = 24 * 3600.0

Store = Annotated[
    str, typer.Argument(metavar="STORE", help="lmdb:PATH, or the data folder of a bus.")
]
Target = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Where to; must be missing or empty.")
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("info", help="Say what is in a store, and how large its file is.")(info)
    group.command("verify", help="Look for damage: in the file's pages, in every block.")(verify)
    group.command("salvage", help="Copy what is whole out of a damaged store.")(salvage)
    group.command("compact", help="Give back the room of what was removed.")(compact)
    group.command("backup", help="Copy a store, also while a bus works with it.")(backup)
    group.command("restore", help="Put a backup into a new, empty folder.")(restore)
    root.add_typer(group, name=name, help=help_line)


def info(store: Store, as_json: flags.Json = False) -> None:
    from polybus.cli.store_info import describe_store, print_store

    found = describe_store(find_store_folder(store))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_store(found)


def verify(store: Store, as_json: flags.Json = False) -> int:
    from polybus.store.lmdb.verification import verify as look

    folder = find_store_folder(store)
    with show_progress("verifying") as told:
        report = look(folder, told)
    found = {
        "store": str(folder),
        "topics": report.topics,
        "blocks": report.blocks,
        "messages": report.messages,
        "bytes": report.bytes,
        "fault_count": report.fault_count,
        "faults": list(report.faults),
    }
    whole = f"{report.messages} messages in {report.blocks} blocks, {format_size(report.bytes)}"
    if report.fault_count:
        faults = f"{report.fault_count} fault{'s' if report.fault_count > 1 else ''} found"
        _answer(found, as_json, *report.faults, f"{faults}; whole are {whole}")
        return DAMAGE_FOUND
    _answer(found, as_json, f"no damage: {whole}")
    return 0


def salvage(store: Store, target: Target, as_json: flags.Json = False) -> int:
    from polybus.store.lmdb.salvage import salvage as recover

    folder, fresh = find_store_folder(store, mark=DATA), check_new_folder(target)
    with show_progress("salvaging") as told:
        found = recover(folder, fresh, told)
    answer = {
        "store": str(folder),
        "target": str(fresh),
        "topics": found.topics,
        "blocks": found.blocks,
        "messages": found.messages,
        "bytes": found.bytes,
        "lost": list(found.lost),
    }
    saved = f"{found.messages} messages of {found.topics} topics, {format_size(found.bytes)}"
    lost = [f"lost: {line}" for line in found.lost]
    _answer(answer, as_json, *lost, f"salvaged into {fresh}: {saved}")
    return DAMAGE_FOUND if found.lost else 0


def compact(store: Store, as_json: flags.Json = False, admin: flags.Admin = None) -> None:
    folder = find_store_folder(store)
    before, after = _compacted(folder, admin)
    answer = {"store": str(folder), "before_bytes": before, "after_bytes": after}
    _answer(answer, as_json, f"compacted {folder}: {format_size(before)} → {format_size(after)}")


def backup(store: Store, target: Target, as_json: flags.Json = False) -> None:
    from polybus.store.lmdb.store_copy import backup as copy

    folder, fresh = find_store_folder(store), check_new_folder(target)
    with show_progress("copying") as told:
        written = copy(folder, fresh, told)
    answer = {"store": str(folder), "target": str(fresh), "bytes": written}
    _answer(answer, as_json, f"backed up {folder} into {fresh}: {format_size(written)}")


def restore(
    store: Annotated[str, typer.Argument(metavar="BACKUP", help="What `backup` wrote.")],
    target: Target,
    as_json: flags.Json = False,
) -> None:
    from polybus.store.lmdb.store_copy import restore as copy

    folder, fresh = find_store_folder(store), check_new_folder(target)
    with show_progress("restoring") as told:
        written = copy(folder, fresh, told)
    answer = {"backup": str(folder), "target": str(fresh), "bytes": written}
    _answer(answer, as_json, f"restored {folder} into {fresh}: {format_size(written)}")


def _compacted(folder: Path, admin: str | None) -> tuple[int, int]:
    """Bytes of the file before and after. Whoever holds the store does it: a bus, or we."""
    from polybus.errors import DataFolderInUse
    from polybus.store.lmdb.store_copy import compact as rewrite

    try:
        with show_progress("compacting") as told:
            return rewrite(folder, told)
    except DataFolderInUse as held:
        return _asked_to_compact(folder, admin, held)


def _asked_to_compact(folder: Path, admin: str | None, held: Exception) -> tuple[int, int]:
    from polybus.cli.admin_request import ask_admin
    from polybus.errors import DataFolderInUse, PolybusError

    try:
        told = ask_admin("store_compact", admin, timeout_s=COMPACT_TIMEOUT_S, folder=str(folder))
    except PolybusError as error:
        raise DataFolderInUse(f"{held}; and no bus that holds it compacts it: {error}") from None
    return told["before_bytes"], told["after_bytes"]


def _answer(found: dict[str, Any], as_json: bool, *lines: str) -> None:
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))
