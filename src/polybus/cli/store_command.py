"""`polybus store info|verify|salvage|compact|backup|restore`: maintenance of a store's files.

polybus store verify /var/lib/polybus
polybus store backup /srv/bus /mnt/backup/bus-monday

STORE is the URL of a store, its folder, or the data folder of a bus. The commands work on
the files, whether or not a bus owns them; only `compact` asks the owning bus to do it.
Each prints one line, or an object with `--json`. Exit code 0 means success, 1 that damage
was found, 2 that the command could not be executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli import flags
from polybus.cli.progress_bar import format_size, show_progress

if TYPE_CHECKING:
    from polybus.model.topic import Topic
    from polybus.store.contract import Store
    from polybus.store.engine_registry import StoreLocation

DAMAGE_FOUND = 1
# Compacting terabytes takes hours. A bus that dies meanwhile closes the connection.
COMPACT_TIMEOUT_S = 24 * 3600.0
PRIVATE = 0o700

StoreArgument = Annotated[
    str,
    typer.Argument(metavar="STORE", help="URL or folder of a store, or the data folder of a bus."),
]
BackupArgument = Annotated[
    str, typer.Argument(metavar="BACKUP", help="Folder that `backup` wrote.")
]
Target = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Target folder; must be missing or empty.")
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("info", help="Show the topics of a store and the size of its file.")(info)
    group.command("verify", help="Check the pages of the file and every block for damage.")(verify)
    group.command("salvage", help="Copy the intact messages of a damaged store.")(salvage)
    group.command("compact", help="Return free space to the file system.")(compact)
    group.command("backup", help="Copy a store, also while a bus uses it.")(backup)
    group.command("restore", help="Create a store from a backup.")(restore)
    root.add_typer(group, name=name, help=help_line)


def info(store: StoreArgument, as_json: flags.Json = False) -> int:
    from polybus.store.engine_registry import open_store

    location = _find(store)
    with open_store(location.url, read_only=True) as opened:
        damaged = {topic.name: reason for topic, reason in opened.damaged_topics()}
        topics = [
            _describe_topic(opened, topic) for topic in opened.topics() if topic.name not in damaged
        ]
    file = location.maintenance.info(location.folder)._asdict()
    described = {
        "store": str(location.folder),
        "file": file,
        "topics": topics,
        "damaged": [{"name": name, "reason": damaged[name]} for name in sorted(damaged)],
    }
    if as_json:
        print(json.dumps(described, indent=2))
    else:
        _print_info(described)
    return DAMAGE_FOUND if damaged else 0


def verify(store: StoreArgument, as_json: flags.Json = False) -> int:
    location = _find(store)
    with show_progress("verifying") as progress:
        report = location.maintenance.verify(location.folder, progress)
    result = {
        "store": str(location.folder),
        "topics": report.topics,
        "blocks": report.blocks,
        "messages": report.messages,
        "bytes": report.bytes,
        "fault_count": report.fault_count,
        "faults": list(report.faults),
    }
    intact = f"{report.messages} messages in {report.blocks} blocks, {format_size(report.bytes)}"
    if report.fault_count:
        faults = f"{report.fault_count} fault{'s' if report.fault_count > 1 else ''} found"
        _print_result(result, as_json, *report.faults, f"{faults}; intact: {intact}")
        return DAMAGE_FOUND
    _print_result(result, as_json, f"no damage: {intact}")
    return 0


def salvage(store: StoreArgument, target: Target, as_json: flags.Json = False) -> int:
    location, target = _find(store, damaged=True), _check_target(target)
    with show_progress("salvaging") as progress:
        report = location.maintenance.salvage(location.folder, target, progress)
    result = {
        "store": str(location.folder),
        "target": str(target),
        "topics": report.topics,
        "blocks": report.blocks,
        "messages": report.messages,
        "bytes": report.bytes,
        "lost": list(report.lost),
    }
    saved = f"{report.messages} messages of {report.topics} topics, {format_size(report.bytes)}"
    lost = [f"lost: {line}" for line in report.lost]
    _print_result(result, as_json, *lost, f"salvaged into {target}: {saved}")
    return DAMAGE_FOUND if report.lost else 0


def compact(store: StoreArgument, as_json: flags.Json = False, admin: flags.Admin = None) -> None:
    from polybus.errors import DataFolderInUse

    location = _find(store)
    folder = location.folder
    try:
        with show_progress("compacting") as progress:
            before, after = location.maintenance.compact(folder, progress)
    except DataFolderInUse as in_use:
        before, after = _compact_by_owner(folder, admin, in_use)
    result = {"store": str(folder), "before_bytes": before, "after_bytes": after}
    sizes = f"{format_size(before)} → {format_size(after)}"
    _print_result(result, as_json, f"compacted {folder}: {sizes}")


def backup(store: StoreArgument, target: Target, as_json: flags.Json = False) -> None:
    location, target = _find(store), _check_target(target)
    with show_progress("copying") as progress:
        written = location.maintenance.backup(location.folder, target, progress)
    result = {"store": str(location.folder), "target": str(target), "bytes": written}
    line = f"backed up {location.folder} into {target}: {format_size(written)}"
    _print_result(result, as_json, line)


def restore(store: BackupArgument, target: Target, as_json: flags.Json = False) -> None:
    location, target = _find(store), _check_target(target)
    with show_progress("restoring") as progress:
        written = location.maintenance.restore(location.folder, target, progress)
    result = {"backup": str(location.folder), "target": str(target), "bytes": written}
    line = f"restored {location.folder} into {target}: {format_size(written)}"
    _print_result(result, as_json, line)


def _find(store: str, *, damaged: bool = False) -> StoreLocation:
    from polybus.store.engine_registry import find_store

    return find_store(store, damaged=damaged)


def _check_target(path: Path) -> Path:
    """Return the absolute path of a folder that is missing or empty and can be written.

    Raises `UsageError` otherwise, before a long copy starts.
    """
    from polybus.errors import UsageError

    path = path.absolute()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is not a folder")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty; give a folder that is missing or empty")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    # Only creating a folder shows whether it can be created: a file system that is
    # read-only or full refuses what the permission bits allow.
    probe = path / "probe" if path.is_dir() else path
    try:
        probe.mkdir(mode=PRIVATE)
        probe.rmdir()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _compact_by_owner(folder: Path, admin: str | None, in_use: Exception) -> tuple[int, int]:
    """Ask the bus that owns the store to compact it. Returns the bytes before and after."""
    from polybus.cli.admin_request import ask_admin
    from polybus.errors import DataFolderInUse, PolybusError

    try:
        sizes = ask_admin("store_compact", admin, timeout_s=COMPACT_TIMEOUT_S, folder=str(folder))
    except PolybusError as error:
        raise DataFolderInUse(f"{in_use}, and no bus compacted it: {error}") from None
    return sizes["before_bytes"], sizes["after_bytes"]


def _describe_topic(store: Store, topic: Topic) -> dict[str, Any]:
    bounds = store.bounds(topic.number)
    return {
        "name": topic.name,
        "number": topic.number,
        "generations": list(topic.generations),
        "settings": dict(topic.settings),
        "first_id": bounds.first_id,
        "next_id": bounds.next_id,
        "messages": sum(shard.end - shard.start for shard in bounds.shards),
        "bytes": sum(shard.size_bytes for shard in bounds.shards),
        "shards": [shard._asdict() for shard in bounds.shards],
    }


def _print_info(described: dict[str, Any]) -> None:
    from polybus.cli import text_table

    file = described["file"]
    used = f"{format_size(file['used_bytes'])} used, {format_size(file['free_bytes'])} free"
    owner = f"owned by pid {file['owner_pid']}" if file["owner_pid"] else "no owner"
    print(f"{described['store']}: {format_size(file['file_bytes'])}, {used}; {owner}")
    for damaged in described["damaged"]:
        print(damaged["reason"])
    if not described["topics"]:
        print("no topics")
        return
    rows = [
        [
            topic["name"],
            len(topic["shards"]),
            topic["messages"],
            format_size(topic["bytes"]),
            topic["next_id"],
        ]
        for topic in described["topics"]
    ]
    text_table.print_table(("topic", "shards", "messages", "bytes", "next id"), rows)


def _print_result(result: dict[str, Any], as_json: bool, *lines: str) -> None:
    print(json.dumps(result, indent=2) if as_json else "\n".join(lines))
