"""`polybus topic stats`: message counts of topics; of one topic by shard, with its readers.

polybus topic stats                     one row per topic
polybus topic stats orders              shards, groups and Spark queries of a topic
polybus topic stats orders --watch 5    repeat every five seconds, with rates

`--watch` draws a live table on a terminal, and else prints one line of JSON per round. It
waits for a bus that restarts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from polybus.cli import flags
from polybus.cli.bus_connection import Bus, open_bus_or_store
from polybus.cli.group_table import show_groups
from polybus.cli.progress_bar import format_size
from polybus.cli.terminal import drawing_stream
from polybus.cli.text_table import print_fields, print_table
from polybus.errors import Damaged, DoesNotExist, UsageError

if TYPE_CHECKING:
    from polybus.native import Client
    from polybus.native.protocol.answers import TopicStats

PATTERN = "Only topics that match; * matches any characters."
SECONDS = "Interval of --watch in seconds. [default: 1]"
WATCH_S, LEAST_S = 1.0, 0.1
CLEAR = "\x1b[H\x1b[2J"
COLUMNS = (
    *("topic", "shards", "messages", "inserted", "trimmed", "size"),
    *("emitted", "acked", "redelivered", "dead", "delayed", "paused"),
)
SHORT = {
    **{name: name for name in ("topic", "inserted", "trimmed", "size", "emitted", "acked")},
    "again": "redelivered",
    "dead": "dead",
    "paused": "paused",
}
WATCHED = {
    **{name: name for name in ("topic", "inserted", "in/s", "emitted", "acked", "acked/s")},
    "again": "redelivered",
    "dead": "dead",
    "size": "size",
}


def stats(
    pattern: Annotated[str, typer.Argument(metavar="[PATTERN]", help=PATTERN)] = "*",
    seconds: Annotated[
        float | None, typer.Argument(metavar="[SECONDS]", help=SECONDS, show_default=False)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until interrupted, with rates.")
    ] = False,
    as_json: flags.Json = False,
    bus: Bus = None,
) -> None:
    if watch:
        every_s = WATCH_S if seconds is None else seconds
        if not LEAST_S <= every_s < math.inf:
            raise UsageError(f"SECONDS must be a number >= {LEAST_S:g}, got {seconds:g}")
        with open_bus_or_store(bus, connect_timeout_s=math.inf) as client:
            _watch(client, pattern, every_s, as_lines=as_json or not sys.stdout.isatty())
    if seconds is not None:
        raise UsageError("SECONDS needs --watch: polybus topic stats TOPIC --watch 5")
    with open_bus_or_store(bus) as client:
        topics = _stats(client, pattern)
    if as_json:
        print(json.dumps(topics, indent=2))
    elif len(topics) == 1:
        shards = [
            {"topic": f"  shard {shard['shard']}", **_counts(shard)}
            for shard in topics[0]["shards"]
        ]
        print_fields(COLUMNS, SHORT, [_row(topics[0]), *shards])
        _show_readers(topics[0], by_shard=True)
    else:
        print_fields(COLUMNS, SHORT, [_row(topic) for topic in topics])


def _stats(client: Client, pattern: str) -> list[TopicStats]:
    if "*" not in pattern:
        return [client.topic_stats(pattern)]
    found = []
    for topic in client.topics(pattern):
        try:
            found.append(client.topic_stats(topic["topic"]))
        except DoesNotExist:  # deleted since it was listed
            continue
        except Damaged as error:  # the others can be shown
            print(f"polybus: {error}", file=sys.stderr)
    return found


def _watch(client: Client, pattern: str, every_s: float, *, as_lines: bool) -> NoReturn:
    """Print or draw rounds until the command is interrupted."""
    before: dict[str, dict[str, int]] = {}
    before_s = time.monotonic()
    while True:
        found, now_s = _stats(client, pattern), time.monotonic()
        if as_lines:
            print(json.dumps(found), flush=True)
        else:
            _draw(found, before, now_s - before_s)
        before, before_s = {one["topic"]: one["all"] for one in found}, now_s
        time.sleep(every_s)


def _draw(found: list[TopicStats], before: dict[str, dict[str, int]], elapsed_s: float) -> None:
    """Redraw the screen: all topics, or one topic with its groups."""
    rows = [{**_row(one), **_rates(one, before.get(one["topic"]), elapsed_s)} for one in found]
    print(CLEAR, end="", file=drawing_stream(sys.stdout), flush=True)
    print_fields(list(WATCHED.values()), WATCHED, rows)
    if len(found) == 1:
        _show_readers(found[0], by_shard=False)
    sys.stdout.flush()


def _rates(one: TopicStats, before: dict[str, int] | None, elapsed_s: float) -> dict[str, Any]:
    if before is None or elapsed_s <= 0:
        return {}
    since = {key: one["all"][key] - before[key] for key in ("inserted", "acked")}
    each_s = {key: max(0, round(count / elapsed_s)) for key, count in since.items()}
    return {"in/s": each_s["inserted"], "acked/s": each_s["acked"]}


def _show_readers(one: TopicStats, *, by_shard: bool) -> None:
    if one["groups"]:
        print()
        show_groups(one["groups"], by_shard=by_shard)
    if one["queries"]:
        print()
        queries = [[query["query"], query["name"] or "", query["lag"]] for query in one["queries"]]
        print_table(("query", "name", "lag"), queries)
    if one.get("subscribers"):  # older buses do not send it
        print()
        rows = [[each["id"], each["last"], each["lag"]] for each in one["subscribers"]]
        print_table(("subscriber", "last", "lag"), rows)


def _row(one: TopicStats) -> dict[str, Any]:
    return {
        "topic": one["topic"],
        "shards": len(one["shards"]),
        **_counts(one["all"]),
        "delayed": one["delayed"]["messages"],
        "paused": ", ".join(one.get("paused", ())) or "-",  # older buses do not send it
    }


def _counts(one: dict[str, int]) -> dict[str, Any]:
    counts = {key: one[key] for key in ("inserted", "trimmed", "emitted", "acked", "redelivered")}
    left = one["inserted"] - one["trimmed"]
    return {
        **counts,
        "messages": left,
        "size": format_size(one["bytes"]),
        "dead": one["dead_lettered"],
    }
