"""`python -m bench scaling [--only ROW …] [--repeats N] [--json FILE]`.

Measures what one step costs at three sizes of what it should not depend on, each ten times the one
before. All steps run in this process, so that a row shows the growth of one structure. A cost is
the median of the repeats; the last column is the cost at the largest size over the smallest.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from typing import NamedTuple

from bench.harness.places import output_folder
from bench.harness.report import table
from bench.scaling.in_process import InProcessBus
from polybus.bus.shares import unshared_table
from polybus.groups.shard_ends import ShardEnds
from polybus.model.block import Block
from polybus.model.commit import Append, Commit
from polybus.model.topic import ALL, Topic
from polybus.native.port.shard_waits import ShardWaits
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.memory.memory_store import MemoryStore

US_PER_S = 1e6
ROWS_PER_PAGE = 1000
ROWS_PER_BLOCK = 500
LONG_S = 600.0
POLL_S = 0.0001
SHARED_TOPICS = 100
MAX_ROUNDS = 3  # each round has all clients join and leave

Costs = list[float]  # seconds, one a repeat


class Row(NamedTuple):
    title: str
    against: str
    sizes: tuple[int, int, int]
    measure: Callable[[int, int], Costs]  # size, repeats


def _timed(step: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def measure_subscribe(members: int, repeats: int) -> Costs:
    """Time one more subscription to a topic."""
    return _change_members(members, repeats, 0)


def measure_unsubscribe(members: int, repeats: int) -> Costs:
    """Time the end of one subscription to a topic."""
    return _change_members(members, repeats, 1)


def _change_members(members: int, repeats: int, which: int) -> Costs:
    bus = InProcessBus()
    for _ in range(members):
        bus.broker.subscribe(bus.connect(), b"shared")
    guest = bus.connect()
    costs = [
        (
            _timed(lambda: bus.broker.subscribe(guest, b"shared")),
            _timed(lambda: bus.broker.unsubscribe(guest, b"shared")),
        )[which]
        for _ in range(repeats)
    ]
    bus.close()
    return costs


def measure_clients(clients: int, repeats: int) -> Costs:
    """Time the processor for one client that subscribes to topics that all others have, too."""
    names = [b"t%d" % number for number in range(SHARED_TOPICS)]
    costs: Costs = []
    for _ in range(min(repeats, MAX_ROUNDS)):
        bus = InProcessBus()
        members = [bus.connect() for _ in range(clients)]
        began_s = time.process_time()
        for member in members:
            for name in names:
                bus.broker.subscribe(member, name)
        for member in members:
            bus.broker.leave(member)
        costs.append((time.process_time() - began_s) / clients)
        bus.close()
    return costs


def measure_disconnect(tails: int, repeats: int) -> Costs:
    """Time the end of a connection with one durable topic, while others follow theirs."""
    bus = InProcessBus()
    other = bus.connect()
    for number in range(tails):
        bus.create_topic(f"t{number}")
        bus.broker.subscribe(other, b"t%d" % number)
    costs = []
    for _ in range(repeats):
        guest = bus.connect()
        bus.broker.subscribe(guest, b"t0")
        costs.append(_timed(lambda: bus.broker.leave(guest)))  # noqa: B023 -- called at once
        bus.turn()
    bus.close()
    return costs


def measure_connections(connections: int, repeats: int) -> Costs:
    """Time one step of the admin verb `connections`: 100 connections of all."""
    bus = InProcessBus()
    for _ in range(connections):
        bus.connect()
    listed = bus.broker.overview.connections
    costs = [_timed(lambda: listed.page(f"0.{connections - 100}", 100)) for _ in range(repeats)]
    bus.close()
    return costs


def measure_wake(shards: int, repeats: int) -> Costs:
    """Time the processor that a thread needs that waits for all shards, for one wake of one."""
    with MemoryStore() as store:
        topic = store.create("t", shards, {}).number
        waits = ShardWaits(
            store,
            unshared_table("max_waits", 1),
            unshared_table("wait_positions", shards),
            time.monotonic,
            ShardEnds(store),
        )
        noted: Costs = []
        wanted = {(topic, shard): 0 for shard in range(shards)}
        waiter = Thread(
            target=lambda: waits.wait(
                wanted, LONG_S, check_access=lambda: noted.append(time.thread_time())
            )
        )
        waiter.start()
        while len(noted) <= repeats + 1:
            known = len(noted)
            waits.wake(topic, 0)
            while len(noted) == known:
                time.sleep(POLL_S)
        store.commit(Commit((Append(topic, 0, _block(1)),))).result()
        waiter.join()
        waits.close()
    # The first difference has the check of all places, when the wait begins.
    return [after - before for before, after in pairwise(noted[1:])]


def measure_page(shards: int, repeats: int) -> Costs:
    """Time a page of all shards of a topic that was written in turn."""
    folder = Path(tempfile.mkdtemp(prefix="scaling-", dir=output_folder()))
    try:
        with LmdbStore(folder / "store") as store:
            topic = store.create("t", shards, {})
            blocks = (repeats + 1) * ROWS_PER_PAGE // ROWS_PER_BLOCK
            appends = [
                Append(topic.number, n % shards, _block(ROWS_PER_BLOCK)) for n in range(blocks)
            ]
            for future in [store.commit(Commit((append,))) for append in appends]:
                future.result()
            return _read_pages(store, topic, repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_pages(store: LmdbStore, topic: Topic, repeats: int) -> Costs:
    costs: Costs = []
    at_id = 0
    while len(costs) <= repeats:
        began_s = time.perf_counter()
        rows = store.read(topic.number, ALL, at_id, max_rows=ROWS_PER_PAGE)
        costs.append(time.perf_counter() - began_s)
        at_id = int.from_bytes(rows.ids[-8:], "little") + 1
    return costs[1:]  # the first page searches every shard


def _block(count: int) -> Block:
    offsets = memoryview(bytes(4 * (count + 1)))  # messages without bodies
    return Block.from_columns(b"", offsets, insertion_ms=0)


ROWS = {
    "subscribe": Row("subscribe", "members of the topic", (100, 1_000, 10_000), measure_subscribe),
    "unsubscribe": Row(
        "unsubscribe", "members of the topic", (100, 1_000, 10_000), measure_unsubscribe
    ),
    "clients": Row(
        f"join and leave with {SHARED_TOPICS} topics",
        "clients with the same topics",
        (100, 1_000, 10_000),
        measure_clients,
    ),
    "disconnect": Row("disconnect", "durable tails", (10, 100, 1_000), measure_disconnect),
    "wake": Row("wake of a waiting read", "shards", (5, 50, 500), measure_wake),
    "page": Row("page of 1000 rows of all shards", "shards", (5, 50, 500), measure_page),
    "connections": Row(
        "100 connections of the admin verb",
        "connections",
        (100, 1_000, 10_000),
        measure_connections,
    ),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench scaling")
    parser.add_argument("--only", action="append", choices=list(ROWS), metavar="ROW")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    lines = [["step", "against", "×1", "×10", "×100", "µs ×1", "µs ×10", "µs ×100", "growth"]]
    found: dict[str, dict[str, float]] = {}
    for name in options.only or ROWS:
        row = ROWS[name]
        costs = [median(row.measure(size, options.repeats)) * US_PER_S for size in row.sizes]
        found[name] = {str(size): cost for size, cost in zip(row.sizes, costs, strict=True)}
        sizes, shown = [str(size) for size in row.sizes], [f"{cost:.1f}" for cost in costs]
        lines.append([row.title, row.against, *sizes, *shown, f"{costs[-1] / costs[0]:.1f}"])
    print(table(lines))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0
