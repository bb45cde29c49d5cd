"""A million delayed messages, each with a due time of its own, in bounded memory.

They are put into the store of a stopped bus, by the code that a bus uses, because a million
answered calls would take most of the time. Then the bus starts, and all of them are due.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from polybus.durable.topic_registry import DurableTopics
from polybus.model.identity import Identity
from polybus.store.engine_registry import canonical_url, open_store
from polybus.testing.conformance.sample_blocks import block
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until
from tests.rig.soak_runs import SoakRun

TOPIC = "reminders"
MESSAGES = int(os.environ.get("POLYBUS_DELAYED_MESSAGES", "1000000"))
IN_FLIGHT = 1024
PATIENCE_S = 1800
WARM_UP = 20_000  # messages, after which the writer's tables have their full size
# The writer's tables and the batches in flight; a million objects would take more.
MAX_GROWTH_BYTES = 96 << 20


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process without mapped files, of which LMDB's is one."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def fill(data: Path) -> tuple[int, int]:
    """Put the messages into the store. Returns how many are pending, and the growth of memory."""
    caller, first_ns, before = Identity(uid=os.getuid()), time.time_ns() - MESSAGES * 1000, 0
    with open_store(canonical_url(f"lmdb:{data}")) as store:
        durable = DurableTopics(store)
        topic = durable.get(TOPIC)
        sent: deque[Future[Any]] = deque()
        for number in range(MESSAGES):
            if number == WARM_UP:
                before = anonymous_bytes(os.getpid())
            message = block(b"%d" % number, keys=[f"k{number % 100}"])
            due_ns = first_ns + number * 1000
            sent.append(durable.delayed.produce(topic, message, due_ns, None, caller))
            if len(sent) > IN_FLIGHT:
                sent.popleft().result(PATIENCE_S)
        for future in sent:
            future.result(PATIENCE_S)
        return durable.delayed.totals(topic.number).messages, anonymous_bytes(os.getpid()) - before


@pytest.mark.soak
@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_million_pending_delays_take_bounded_memory():
    run = SoakRun("delayed messages", random.randrange(1 << 32))
    with NativeBus() as bus, bus.client() as client:
        client.create_topic(TOPIC, shards=4)
        before, data = anonymous_bytes(bus.process.pid), bus.process.data
        bus.stop()
        pending, fill_growth = fill(data)
        began_s = time.monotonic()
        bus.start()
        start_s = time.monotonic() - began_s
        peak = 0

        def are_appended() -> bool:
            nonlocal peak
            peak = max(peak, anonymous_bytes(bus.process.pid))
            return not client.topic(TOPIC)["delayed"]["messages"]

        until(are_appended, "all are appended", PATIENCE_S)
        bodies: set[bytes] = set()
        rows = 0
        for batch in client.read(TOPIC, start=1):
            bodies.update(batch.column("body").to_pylist())
            rows += batch.num_rows
    growth = max(fill_growth, peak - before)
    run.record(
        messages=rows,
        pending_max=pending,
        rss_growth_mb_max=growth >> 20,
        start_s_max=round(start_s, 1),
    )
    assert (pending, rows, len(bodies)) == (MESSAGES, MESSAGES, MESSAGES)
    assert growth < MAX_GROWTH_BYTES, f"{fill_growth >> 20} and {(peak - before) >> 20} MiB"
