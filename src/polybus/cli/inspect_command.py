"""`polybus inspect`: print a store as a tree of paths, the layout that FDQ was designed with.

    fdq/config/topics/orders -> {"shards": 2, …}
    fdq/config/topics/orders/consumers/default:billing-1 -> [0, 1]
    fdq/config/topics/orders/shards/0 -> {"start": 0, "end": 2, …}
    fdq/topic/orders/all/stats/inserted -> 3
    fdq/topic/orders/shards/0/data/1769860800000:17:customer-7 -> "a chair"

It prints one path per line, for grep and cut. It asks a running bus, or reads the files of a
store (`--store`), whether or not a bus owns them. It shows the first messages of each shard
and of `all`, and the first bytes of each message; flags raise both limits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybus.cli.bus_connection import Bus, connect_once
from polybus.cli.text_table import escape_control
from polybus.errors import Damaged, UsageError
from polybus.model.topic import ALL

if TYPE_CHECKING:
    from polybus.cli.inspect_source import InspectSource

MESSAGES, BODY_BYTES = 3, 64
Line = tuple[str, Any]

STORE = "Read a store: its URL, its folder or the data folder of a bus."
CONFIG, TOPIC = "fdq/config/topics", "fdq/topic"
NO_COUNT = ("shard",)


def register(root: typer.Typer, name: str, help_line: str) -> None:
    root.command(name, help=help_line)(inspect)


def inspect(
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help="Topics to show; * matches any text.")
    ] = "*",
    store: Annotated[str | None, typer.Option("--store", metavar="STORE", help=STORE)] = None,
    messages: Annotated[
        int, typer.Option("-n", "--messages", min=0, help="Messages to show per shard, and of all.")
    ] = MESSAGES,
    every: Annotated[bool, typer.Option("--every", help="Show every message.")] = False,
    body_bytes: Annotated[
        int, typer.Option("--body-bytes", min=0, help="Bytes to show of each message.")
    ] = BODY_BYTES,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object per line, with whole messages.")
    ] = False,
    bus: Bus = None,
) -> None:
    if store is not None and bus is not None:
        raise UsageError("--store and --bus exclude each other")
    with _open_source(store, bus) as source:
        for topic in source.topics(pattern):
            try:
                for path, value in _tree(source, topic, None if every else messages):
                    _print_line(path, value, body_bytes, as_json)
            except Damaged as error:  # the other topics can be shown
                _print_line(f"{CONFIG}/{topic['topic']}/damaged", str(error), body_bytes, as_json)


def _open_source(store: str | None, bus: str | None) -> InspectSource:
    from polybus.cli.inspect_source import BusSource, StoreSource

    if store is None:
        return BusSource(connect_once(bus))
    from polybus.store.engine_registry import find_store, open_store

    return StoreSource(open_store(find_store(store).url, read_only=True))


def _tree(source: InspectSource, topic: Mapping[str, Any], count: int | None) -> Iterator[Line]:
    name = topic["topic"]
    stats = source.stats(name)
    yield from _config(topic, stats)
    yield from _counts(f"{TOPIC}/{name}/all", stats["all"])
    yield from _data(source, name, ALL, stats["all"], count)
    for shard in stats["shards"]:
        yield from _counts(f"{TOPIC}/{name}/shards/{shard['shard']}", shard)
        yield from _data(source, name, shard["shard"], shard, count)


def _config(topic: Mapping[str, Any], stats: Mapping[str, Any]) -> Iterator[Line]:
    path = f"{CONFIG}/{topic['topic']}"
    yield path, {key: value for key, value in topic.items() if key != "topic"}
    for group in stats["groups"]:
        for member in group["members"]:
            consumer = f"{group['group']}:{member['consumer']}"
            yield f"{path}/consumers/{consumer}", member["shards"]
    for shard in stats["shards"]:
        number = shard["shard"]
        owners = {
            group["group"]: state["owner"]
            for group in stats["groups"]
            for state in group["shards"]
            if state["shard"] == number and state["owner"]
        }
        bounds = {"start": shard["trimmed"], "end": shard["inserted"], "owners": owners}
        yield f"{path}/shards/{number}", bounds


def _counts(path: str, counts: Mapping[str, Any]) -> Iterator[Line]:
    for key, value in counts.items():
        if key not in NO_COUNT:
            yield f"{path}/stats/{key}", value


def _data(
    source: InspectSource,
    topic: str,
    shard: int | str,
    counts: Mapping[str, int],
    count: int | None,
) -> Iterator[Line]:
    there = counts["inserted"] - counts["trimmed"]
    part = "all" if shard == ALL else f"shards/{shard}"
    path = f"{TOPIC}/{topic}/{part}/data"
    shown = 0
    for message in source.messages(topic, shard, there if count is None else min(count, there)):
        key = message["shard_key"]
        yield f"{path}/{message['insertion_ms']}:{message['id']}:{key or ''}", message
        shown += 1
    if there > shown:
        yield f"{path}/…", f"{there - shown} more: -n {there} or --every shows them"


def _print_line(path: str, value: Any, body_bytes: int, as_json: bool) -> None:
    is_message = isinstance(value, dict) and "body" in value
    if as_json:
        from polybus.cli.row_format import row_to_json

        content = row_to_json(value) if is_message else value
        print(json.dumps({"path": path, "value": content}))
    elif is_message:
        print(f"{escape_control(path)} -> {_body(value['body'], body_bytes)}")
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        print(f"{escape_control(path)} -> {escape_control(text)}")


def _body(body: bytes, most: int) -> str:
    """Return the body as text if it is UTF-8, else as hexadecimal digits, cut to `most` bytes."""
    part = body[:most]
    rest = f" … {len(body)} bytes" if len(body) > most else ""
    try:
        # The cut may fall within a character, which does not make the body binary.
        text = part.decode(errors="strict" if len(part) == len(body) else "ignore")
        body.decode()
    except UnicodeDecodeError:
        return f"0x{part.hex()}{rest}"
    return escape_control(json.dumps(text, ensure_ascii=False)) + rest
