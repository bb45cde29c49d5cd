"""Bad input at the pirate socket is refused or dropped, or its sender is cut.

In each case the bus counts it, changes no state, and continues to serve.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from tests.rig.observer import check_unharmed, count, log_lines, rss_bytes, stats, until
from tests.rig.pirate import wire
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.wire import Frames, number
from tests.rig.pirate.zmq_client import Bare
from tests.rig.pirate.zmtp import COMMAND, GREETING, LONG, MORE, RawPeer, frame, ready

MIB = 1 << 20
CLIENT, TOPIC = b"c", "t"
HEAD = [b"PIR1", b"SUB", CLIENT, number(1), number(9), b"t"]
LAST = number(0)
CONFIG = """
[log]
format = "json"
[pirate]
max_unread_bytes = {unread}
max_uncommitted_bytes = {uncommitted}
"""
# The limit for bytes of incomplete messages. MOST_GROWTH adds the bytes that arrive between
# two checks of the memory watch.
UNREAD = 160 * MIB
UNCOMMITTED = 256 * MIB
MOST_PIECES = 3000
MOST_GROWTH = UNREAD + 160 * MIB


@contextlib.contextmanager
def started(
    folder: Path, unread: int = UNREAD, uncommitted: int = UNCOMMITTED
) -> Iterator[PirateBus]:
    config = folder / "bus.toml"
    config.write_text(CONFIG.format(unread=unread, uncommitted=uncommitted))
    with PirateBus("--config", str(config)) as one:
        yield one
        check_unharmed(one.process)


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    with started(tmp_path_factory.mktemp("config")) as one:
        yield one


@pytest.fixture
def bare(bus):
    """A client after HELLO, with a subscription that has one unread message."""
    with Bare(bus.endpoint, CLIENT) as one:
        assert one.ask(wire.hello(CLIENT, 1))[:2] == ("OK", 1)
        one.ask(wire.counted(wire.SUB, CLIENT, 1, 1, TOPIC))
        one.ask(wire.counted(wire.PUT, CLIENT, 1, 2, TOPIC, b"first"))
        yield one
        assert one.ask(wire.hello(CLIENT, 1)) == ("OK", 1, 2), "a counter was used up"
        assert one.ask(wire.get(CLIENT, 1, TOPIC, 0)) == ("MSG", 1, b"first")


def head(**changed: bytes) -> Frames:
    """Return a valid SUB with the given frames replaced."""
    names = ("version", "op", "client", "epoch", "counter", "topic")
    return [changed.get(name, frame) for name, frame in zip(names, HEAD, strict=True)]


MALFORMED: dict[str, Frames] = {
    **{f"only {size} frames": HEAD[:size] for size in range(6)},
    "another version": head(version=b"PIR2"),
    "a version in small letters": head(version=b"pir1"),
    "no version": head(version=b""),
    "an unknown op": head(op=b"TAKE"),
    "an op in small letters": head(op=b"sub"),
    "an op with a blank": head(op=b"SUB "),
    "no op": head(op=b""),
    "no client id": head(client=b""),
    "a client id of 65 bytes": head(client=b"c" * 65),
    "no epoch": head(epoch=b""),
    "an epoch of 7 bytes": head(epoch=bytes(7)),
    "an epoch of 9 bytes": head(epoch=bytes(9)),
    "no counter": head(counter=b""),
    "a counter of 4 bytes": head(counter=bytes(4)),
    "a counter of 9 bytes": head(counter=bytes(9)),
    "counter 0": head(counter=number(0)),
    "no topic": head(topic=b""),
    "a topic of 256 bytes": head(topic=b"t" * 256),
    "a topic that is no UTF-8": head(topic=b"\xff\xfe"),
    "a topic with half a surrogate": head(topic=b"\xed\xa0\x80"),
    "a topic with a NUL": head(topic=b"a\0b"),
    "a topic with a newline": head(topic=b"a\nb"),
    "a topic with a C1 control": head(topic="a\x85b".encode()),
    "a topic with a comma": head(topic=b"a,b"),
    "a topic with a star": head(topic=b"a*"),
    "a topic that begins with _": head(topic=b"_a"),
    "SUB with a frame too many": [*HEAD, b""],
    "UNSUB with a frame too many": [*head(op=b"UNSUB"), b"x"],
    "PUT without a body": head(op=b"PUT"),
    "PUT with counter 0": [*head(op=b"PUT", counter=number(0)), b"x"],
    "HELLO with an epoch": head(op=b"HELLO", epoch=number(1), topic=b""),
    "HELLO with a topic": head(op=b"HELLO", epoch=number(0)),
    "HELLO with a frame too many": [*head(op=b"HELLO", epoch=number(0), topic=b""), b""],
    "HELLO with a short number": head(op=b"HELLO", epoch=number(0), counter=b"1", topic=b""),
    "GET without LAST": head(op=b"GET"),
    "GET with a LAST of 7 bytes": [*head(op=b"GET"), bytes(7)],
    "GET with a LAST of 9 bytes": [*head(op=b"GET"), bytes(9)],
    "GET with two LASTs": [*head(op=b"GET"), LAST, LAST],
    "GET with a LAST that never was": [*head(op=b"GET"), number(2)],
    "GET with the highest LAST there is": [*head(op=b"GET"), number(2**64 - 1)],
    "a large frame where a small one should be": head(client=b"c" * MIB),
    "a large frame as a topic": head(topic=b"t" * MIB),
    "PUT of too much with a bad name": [*head(op=b"PUT", topic=b"*"), bytes(MIB + 1)],
    "many frames of nothing": [b"PIR1"] + [b""] * 10_000,
}


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_requests_are_refused(bus, bare, request_):
    before = count(bus.process, "refused", "pirate_malformed")
    assert bare.ask(request_) == wire.error("MALFORMED")
    assert count(bus.process, "refused", "pirate_malformed") == before + 1


TOO_LARGE: dict[str, Frames] = {
    "a frame of 1 MiB and a byte": [bytes(MIB + 1)],
    "a large one among small ones": [b"x", bytes(MIB + 1), b"x"],
    "64 MiB and a byte": [*[bytes(MIB)] * 64, b"x"],
    "a frame of 64 MiB and a byte": [bytes(64 * MIB + 1)],
}


@pytest.mark.parametrize("body", TOO_LARGE.values(), ids=list(TOO_LARGE))
def test_too_large_messages_are_refused(bus, bare, body):
    before = count(bus.process, "refused", "pirate_too_large")
    assert bare.ask([*head(op=b"PUT"), *body]) == wire.error("TOO_LARGE")
    assert count(bus.process, "refused", "pirate_too_large") == before + 1


def test_largest_message_passes(bus):
    body = [bytes([at]) * MIB for at in range(64)]
    with Bare(bus.endpoint, b"large", try_s=60.0) as bare:
        bare.hello()
        bare.sub("large")
        assert bare.put("large", *body) == ("OK", 2, 1)
        assert bare.get("large") == ("MSG", 1, b"".join(body))
        bare.unsub("large")


def test_message_without_an_empty_frame_is_dropped_and_counted(bus, bare):
    before = count(bus.process, "dropped", "pirate_no_envelope")
    for message in ([b"x"], [b"PIR1", b"HELLO"], [b"x" * 300] * 50):
        bare.send(message)
    until(
        lambda: count(bus.process, "dropped", "pirate_no_envelope") == before + 3, "it is counted"
    )
    assert bare.receive(0.0) is None


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: bus\r\n\r\n", id="HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), id="TLS"),
        pytest.param(bytes(1000), id="zeros"),
        pytest.param(b"\xff" * 1000, id="ones"),
        pytest.param(GREETING[:30], id="half a greeting"),
        pytest.param(GREETING.replace(b"NULL", b"NONE"), id="no such mechanism"),
        pytest.param(GREETING + ready(b"PUB"), id="a socket that does not fit"),
        pytest.param(GREETING + frame(COMMAND, b"\x05READY\xff"), id="a broken READY"),
        pytest.param(GREETING + ready() + b"\x80\x00", id="a frame with unknown flags"),
        pytest.param(
            GREETING + ready() + bytes([LONG]) + b"\xff" * 8, id="a frame of 2^64 - 1 bytes"
        ),
        pytest.param(
            GREETING + ready() + bytes([LONG]) + (65 * MIB).to_bytes(8, "big"),
            id="a frame of 65 MiB",
        ),
    ],
)
def test_non_zeromq_bytes_do_not_disturb_other_clients(bus, bare, said):
    with socket.create_connection(("127.0.0.1", bus.port)) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(said)
        assert bare.ask(wire.get(CLIENT, 1, TOPIC, 0)) == ("MSG", 1, b"first")


@pytest.mark.sabotage("watch-off", expects=r"assert \(\d+ - \d+\) < 335544320")
def test_endless_message_is_cut_and_memory_stays_bounded(tmp_path):
    """Whether its frames are large or empty, which weigh more than they seem to."""
    with started(tmp_path) as bus:
        for piece, a_while, reason in (
            (frame(MORE, bytes(MIB)), 16, "max_unfinished_bytes"),
            (frame(MORE, b"") * (MIB // 4), 1, "max_unread_bytes"),
        ):
            cut_off(bus, piece, a_while, reason)


def cut_off(bus: PirateBus, piece: bytes, a_while: int, reason: str) -> None:
    before, counted = rss_bytes(bus.process.pid), cuts(bus)
    with RawPeer(bus.port) as peer:
        for memory in flood(bus, peer, piece, a_while):
            assert memory - before < MOST_GROWTH
    until(lambda: cuts(bus) > counted, "it is counted")
    # The log is written by a thread of its own, so its line may follow the counter.
    logged = partial(log_lines, bus.process, event="connection cut", reason=reason)
    until(logged, f"the cut is logged with {reason}")


def flood(bus: PirateBus, peer: RawPeer, piece: bytes, a_while: int) -> Iterator[int]:
    """Send pieces until the bus cuts the peer. Yields the memory of the bus before each piece."""
    for sent in range(MOST_PIECES):
        if sent % a_while == 0:
            stats(bus.process)
        yield rss_bytes(bus.process.pid)
        try:
            peer.send(piece)
        except OSError:
            return
    raise AssertionError("it was never cut")


def cuts(bus: PirateBus) -> int:
    reasons = ("max_unfinished_bytes", "max_unread_bytes")
    return sum(count(bus.process, "connections", "closed", reason) for reason in reasons)


def test_unfinished_messages_together_are_bounded(bus, bare):
    """None of them is too large by itself: they grow side by side."""
    before, counted = rss_bytes(bus.process.pid), cuts(bus)
    piece = frame(MORE, bytes(MIB))
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(bus.port)) for _ in range(4)]
        for _ in range(60):
            stats(bus.process)
            if cuts(bus) > counted:
                break
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.send(piece)
            assert rss_bytes(bus.process.pid) - before < MOST_GROWTH
        until(lambda: cuts(bus) > counted, "a connection is cut")


# The guide's bound for the memory of pirate, plus the bytes that arrive between two checks of
# the memory watch (LATE).
TIGHT_UNREAD, TIGHT_UNCOMMITTED, TURN, LATE = 80 * MIB, 65 * MIB, 72 * MIB, 64 * MIB
WITHIN = TIGHT_UNREAD + 3 * TIGHT_UNCOMMITTED + TURN + LATE
PUSHED, BODY = 1900 * MIB, 48


@pytest.mark.soak
@pytest.mark.parametrize("frames", [[bytes(MIB)] * BODY, [bytes(BODY * MIB)]], ids=["good", "bad"])
def test_memory_of_peers_that_push_large_messages_is_bounded(tmp_path, frames):
    """Complete messages, faster than the store commits them, and refused ones."""
    with started(tmp_path, TIGHT_UNREAD, TIGHT_UNCOMMITTED) as bus:
        names = [b"pusher-%d" % number for number in range(3)]
        for name in names:
            with Bare(bus.endpoint, name) as bare:
                bare.hello()
                bare.sub("pushed")
        before, most = own_bytes(bus.process.pid), 0
        pushers = [Thread(target=push, args=(bus.port, name, frames)) for name in names]
        for one in pushers:
            one.start()
        while any(one.is_alive() for one in pushers):
            most = max(most, own_bytes(bus.process.pid))
            pushers[0].join(0.01)
        assert most - before < WITHIN


# Unread answers up to the limit, answers being read from the store, and LATE.
UNTAKEN = TIGHT_UNREAD + 64 * MIB + 5 * 64 * MIB + LATE


@pytest.mark.soak
def test_memory_of_peers_that_read_no_replies_is_bounded(tmp_path):
    """Each asks for a message of 60 MiB, and reads nothing of it."""
    names = [b"asker-%d" % number for number in range(24)]
    with started(tmp_path, TIGHT_UNREAD, TIGHT_UNCOMMITTED) as bus:
        for name in names:
            with Bare(bus.endpoint, name) as bare:
                bare.hello()
                bare.sub("asked")
        with Bare(bus.endpoint, b"writer", try_s=60.0) as bare:
            bare.hello()
            bare.put("asked", *[bytes(MIB)] * 60)
        before, most = own_bytes(bus.process.pid), 0
        with contextlib.ExitStack() as stack:
            for name in names:
                peer = stack.enter_context(RawPeer(bus.port))
                *head, last = [b"", *wire.get(name, 1, "asked", 0)]
                peer.send(b"".join(frame(MORE, one) for one in head) + frame(0, last))
            requests = len(names)
            while answered(bus) < requests:
                most = max(most, own_bytes(bus.process.pid))
        assert most - before < UNTAKEN


def answered(bus: PirateBus) -> int:
    sent = stats(bus.process)
    return int(sent["refused"].get("pirate_busy", 0)) + int(sent["messages"]["delivered"])


def push(port: int, name: bytes, frames: Frames) -> None:
    """Send a share of all bytes. A peer that is cut connects again."""
    body = [*(frame(MORE, one) for one in frames[:-1]), frame(0, frames[-1])]
    left, counter = PUSHED // 3, 2
    while left > 0:
        with contextlib.suppress(OSError), RawPeer(port) as peer:
            while left > 0:
                counter += 1
                head = wire.counted(wire.PUT, name, 1, counter, "pushed")
                for one in (*(frame(MORE, part) for part in (b"", *head)), *body):
                    left -= len(one)
                    peer.send(one)


def own_bytes(pid: int) -> int:
    """Return the resident memory without the mapped pages of the store's file."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
