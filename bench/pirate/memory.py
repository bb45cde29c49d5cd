"""The memory row: with 10,000 subscriptions, a bus that is used goes on in the memory it has.

What counts is the process's own memory: pages of the store's file, which the system lends it, come
and go with the file.
"""

import time
from pathlib import Path

from bench.harness.results import Verdict
from bench.native.contenders import Bus
from bench.pirate.contenders import putting
from bench.pirate.places import Collecting, subscribe

SUBSCRIBERS, TOPICS = 1000, 10
MAX_GROWTH_MB = 5.0
WANTED = f"under {MAX_GROWTH_MB:g}"
MB = 1e6
BUSY = "busy"


def own_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(bus: Bus, seconds: float) -> tuple[Verdict, dict[str, float]]:
    """The verdict, and the figures behind it. The first half of the load warms it up."""
    empty = own_bytes(bus.pid)
    clients = [f"many-{number}".encode() for number in range(SUBSCRIBERS)]
    for number in range(TOPICS):
        subscribe(bus, clients, f"many.{number}", counter=number + 1)
    subscribed = own_bytes(bus.pid)
    held = _load(bus, seconds)
    growth = (max(held[len(held) // 2 :]) - held[len(held) // 2]) / MB
    count = SUBSCRIBERS * TOPICS
    figures = {
        "growth_mb": growth,
        "empty_mb": empty / MB,
        "subscribed_mb": subscribed / MB,
        "bytes_a_subscription": (subscribed - empty) / count,
        "peak_mb": max(held) / MB,
    }
    text = f"{count} subscriptions, PUTs and collecting for {seconds:g} s: growth in MB"
    return Verdict(text, WANTED, growth, growth < MAX_GROWTH_MB), figures


def _load(bus: Bus, seconds: float) -> list[int]:
    """Memory by time, while a topic is written, read and collected."""
    clients = putting(bus, BUSY)
    held: list[int] = []
    end_s = time.monotonic() + seconds
    with Collecting(bus, f"{BUSY}-keeper".encode(), BUSY):
        while time.monotonic() < end_s:
            clients.measure()
            held.append(own_bytes(bus.pid))
    return held
