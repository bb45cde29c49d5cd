"""`polybus store info`: topics, shards and bytes, and the file they are in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polybus.cli import text_table
from polybus.cli.progress_bar import format_size
from polybus.model.topic import Topic
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store
from polybus.store.lmdb.file_info import read_file_info


def describe_store(folder: Path) -> dict[str, Any]:
    with open_store(f"lmdb:{folder}", read_only=True) as store:
        topics = [_topic(store, topic) for topic in store.topics()]
    return {"store": str(folder), "file": read_file_info(folder)._asdict(), "topics": topics}


def _topic(store: Store, topic: Topic) -> dict[str, Any]:
    bounds = store.bounds(topic.number)
    shards = [shard._asdict() for shard in bounds.shards]
    return {
        "name": topic.name,
        "number": topic.number,
        "generations": list(topic.generations),
        "settings": dict(topic.settings),
        "first_id": bounds.first_id,
        "next_id": bounds.next_id,
        "messages": sum(shard.end - shard.start for shard in bounds.shards),
        "bytes": sum(shard.size_bytes for shard in bounds.shards),
        "shards": shards,
    }


def print_store(found: dict[str, Any]) -> None:
    file = found["file"]
    used = f"{format_size(file['used_bytes'])} used, {format_size(file['free_bytes'])} free"
    owner = f"held by pid {file['owner_pid']}" if file["owner_pid"] else "held by nobody"
    print(f"{found['store']}: {format_size(file['file_bytes'])}, {used}; {owner}")
    if found["topics"]:
        columns = ("topic", "shards", "messages", "bytes", "next id")
        text_table.print_table(columns, [_row(topic) for topic in found["topics"]])
    else:
        print("no topics")


def _row(topic: dict[str, Any]) -> list[Any]:
    shards = len(topic["shards"])
    return [topic["name"], shards, topic["messages"], format_size(topic["bytes"]), topic["next_id"]]
