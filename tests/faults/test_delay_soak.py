"""A million delayed messages, each with a due time of its own, in bounded memory."""

from __future__ import annotations

import os
import random
import re
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from polybus.native import Client, ClientOptions
from tests.rig.native_bus import QUICK, NativeBus
from tests.rig.observer import until
from tests.rig.soak_runs import SoakRun

TOPIC = "reminders"
MESSAGES = int(os.environ.get("POLYBUS_DELAYED_MESSAGES", "1000000"))
PRODUCERS = 8
IN_FLIGHT = 16
PATIENCE_S = 1800
# More than the writer's cache and the batches in flight take; a million objects would take more.
MAX_GROWTH_BYTES = 96 << 20
DUE_AFTER_S = 60 + MESSAGES / 2500  # all of them are accepted by then on a slow machine


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process without mapped files, of which LMDB is one."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def fill(url: str, numbers: range, due_s: float) -> None:
    with Client(url, ClientOptions(**QUICK)) as client, client.producer() as producer:
        sent: deque[Future[Any]] = deque()
        for number in numbers:
            body = b"%d" % number
            sent.append(producer.produce(TOPIC, [body], deliver_at=due_s + number * 1e-6))
            if len(sent) > IN_FLIGHT:
                sent.popleft().result(PATIENCE_S)
        for future in sent:
            future.result(PATIENCE_S)


@pytest.mark.soak
@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_million_pending_delays_take_bounded_memory():
    run = SoakRun("delayed messages", random.randrange(1 << 32))
    with NativeBus() as bus, bus.client() as client:
        client.create_topic(TOPIC, shards=4)
        due_s = time.time() + DUE_AFTER_S
        fill(bus.url, range(1000), due_s)  # whatever is allocated once
        before = anonymous_bytes(bus.process.pid)
        step = -(-(MESSAGES - 1000) // PRODUCERS)
        parts = [range(at, min(at + step, MESSAGES)) for at in range(1000, MESSAGES, step)]
        threads = [Thread(target=fill, args=(bus.url, part, due_s)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        pending = client.topic(TOPIC)["delayed"]["messages"]
        grown = anonymous_bytes(bus.process.pid) - before
        bus.kill()
        began_s = time.monotonic()
        bus.start()
        start_s = time.monotonic() - began_s
        assert client.topic(TOPIC)["delayed"]["messages"] == pending
        until(lambda: not client.topic(TOPIC)["delayed"]["messages"], "all are due", PATIENCE_S)
        due_grown = anonymous_bytes(bus.process.pid) - before
        bodies: set[bytes] = set()
        rows = 0
        for batch in client.read(TOPIC, start=1):
            bodies.update(batch.column("body").to_pylist())
            rows += batch.num_rows
        run.record(
            messages=rows,
            pending_max=pending,
            rss_growth_mb_max=max(grown, due_grown) >> 20,
            start_s_max=round(start_s, 1),
        )
    assert (rows, len(bodies)) == (MESSAGES, MESSAGES)
    assert max(grown, due_grown) < MAX_GROWTH_BYTES, f"{grown >> 20} and {due_grown >> 20} MiB"
