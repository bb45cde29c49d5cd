"""Nothing leaks, and no byte outside a buffer is accessed."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import tracemalloc
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding, RqueueFraming
from polybus.kernel.fanout import Fanout, Source
from tests.property.kernel.frames import filler, publish, publish_part

OWN, OTHER = RqueueEncoding(0, 2048), RqueueEncoding(1, 282)
FRAMING = RqueueFraming(OWN)
ROUNDS = 200
SLACK_BYTES = (
    4096  # counters that outgrow small integers, and the like; a leak is ROUNDS times more
)

TOPICS = (b"x", b"y", b"z", b"unheard", b"denied")
WHOLE = b"".join(publish(topic, filler(200)) for topic in TOPICS)
STREAM = WHOLE + b"".join(publish_part(topic, 0, 2, b"half") for topic in TOPICS)


class Outbox:
    pass


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloc_bytes() -> int:
    """Return the bytes that C code has allocated: the tables are invisible to tracemalloc."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def judge(identity: int, topic: bytes) -> bool:
    if topic == b"broken":
        raise LookupError
    return topic != b"denied"


def prepared() -> tuple[Fanout, list[Outbox]]:
    fanout, outboxes = Fanout(judge), [Outbox() for _ in range(4)]
    fanout.has_produce_rules = True
    for outbox, encoding, topics in zip(
        outboxes, (OWN, OWN, OTHER, OTHER), ("xyz", "xy", "xz", "z"), strict=True
    ):
        number = fanout.add_subscriber(outbox, encoding)
        for topic in topics:
            fanout.subscribe(number, topic.encode())
    fanout.set_collect(b"y", True)
    return fanout, outboxes


def route(fanout: Fanout) -> None:
    fanout.forget_verdicts()
    routed = fanout.route(FRAMING, Source(7), STREAM, 0, len(STREAM))
    assert len(routed.outputs) >= 4


def route_and_fail(fanout: Fanout) -> None:
    stream = WHOLE + publish(b"broken", b"")
    fanout.subscribe(0, b"broken")
    with pytest.raises(LookupError):
        fanout.route(FRAMING, Source(7), stream, 0, len(stream))
    fanout.unsubscribe(0, b"broken")


def publish_one(fanout: Fanout) -> None:
    fanout.publish(Source(0), b"z", array("i", [0, 300, 900]), bytes(900), OWN)


def subscribe_and_remove(fanout: Fanout) -> None:
    number = fanout.add_subscriber(Outbox(), OTHER)
    for topic in (b"x", b"y", b"new", b"t" * 255):
        fanout.subscribe(number, topic)
    fanout.set_collect(b"t" * 255, True)
    route(fanout)
    fanout.remove_subscriber(number)
    fanout.set_collect(b"t" * 255, False)


def create_and_discard(_: Fanout) -> None:
    route(prepared()[0])


def be_rejected(fanout: Fanout) -> None:
    with pytest.raises(ValueError, match="within"):
        fanout.route(FRAMING, Source(0), b"", 0, 1)
    with pytest.raises(ValueError, match="offsets"):
        fanout.publish(Source(0), b"x", b"123", b"")
    with pytest.raises(ValueError, match="topic"):
        fanout.subscribe(0, b"")


@pytest.mark.parametrize(
    "act",
    [route, route_and_fail, publish_one, subscribe_and_remove, create_and_discard, be_rejected],
)
def test_nothing_leaks(act: Callable[[Fanout], None]) -> None:
    fanout, outboxes = prepared()
    tracemalloc.start()
    try:
        for _ in range(10):
            act(fanout)
        gc.collect()
        references = [sys.getrefcount(outbox) for outbox in outboxes]
        held, _ = tracemalloc.get_traced_memory()
        for _ in range(ROUNDS):
            act(fanout)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - held < SLACK_BYTES
        assert [sys.getrefcount(outbox) for outbox in outboxes] == references
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("act", [route, route_and_fail, subscribe_and_remove, create_and_discard])
def test_tables_in_c_do_not_leak(act: Callable[[Fanout], None]) -> None:
    fanout, _ = prepared()
    for _ in range(10):
        act(fanout)
    gc.collect()
    held = malloc_bytes()
    for _ in range(ROUNDS):
        act(fanout)
    gc.collect()
    assert malloc_bytes() - held < SLACK_BYTES


def test_only_outputs_and_subscription_reference_an_outbox() -> None:
    fanout, outboxes = prepared()
    counts = [sys.getrefcount(outboxes[0])]
    routed = fanout.route(FRAMING, Source(0), STREAM, 0, len(STREAM))
    counts.append(sys.getrefcount(outboxes[0]))
    del routed
    counts.append(sys.getrefcount(outboxes[0]))
    assert [count - counts[0] for count in counts] == [0, 1, 0]
    seen = weakref.ref(outboxes.pop(0))
    fanout.remove_subscriber(0)
    assert seen() is None


def test_only_outputs_reference_shared_bytes() -> None:
    fanout = Fanout(judge)
    for outbox in "ab":
        fanout.subscribe(fanout.add_subscriber(outbox, OWN), b"x")
    data = publish(b"x", b"1")
    routed = fanout.route(FRAMING, Source(0), data, 0, len(data))
    shared = routed.outputs[0][1]
    counts = [sys.getrefcount(shared)]
    del routed
    counts.append(sys.getrefcount(shared))
    assert counts[0] - counts[1] == 2


def test_fanout_in_a_reference_cycle_is_collected() -> None:
    """Reference cycles through the kernel's objects are seen by the collector."""

    class Bus:
        def __init__(self) -> None:
            self.fanout = Fanout(self.judge)
            self.fanout.subscribe(self.fanout.add_subscriber(self, OWN), b"x")

        def judge(self, identity: int, topic: bytes) -> bool:
            return True

    bus = Bus()
    route_once = publish(b"x", b"1")
    bus.fanout.route(FRAMING, Source(0), route_once, 0, len(route_once))
    seen = weakref.ref(bus)
    del bus
    gc.collect()
    assert seen() is None


def test_no_byte_outside_the_buffer_is_accessed() -> None:
    """Buffers of every size between two forbidden pages, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernel.forbidden_pages"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    assert done.stdout == "nothing outside was touched\n"
