"""The framing of an older client: lengths that count the header, a Get Message of 24.

The frames are built here by the two rules of docs/spec/freud.md, without the codec.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from polybus.dialects.freud.server.request_scanner import TOO_LARGE, TOO_SHORT, RequestScanner
from polybus.model.address import Address
from polybus.testing.bus_process import BusProcess, serve
from tests.property.kernel.freud_requests import CAP, ones, streams
from tests.rig import freud_client
from tests.rig.freud_client import OK, Answer
from tests.rig.oracle import freud as oracle

NAME = b"news"


def old_frame(kind: int, payload: bytes = b"") -> bytes:
    length = 24 if kind == 5 else len(payload) + 8
    return struct.pack("<II", kind, length) + payload


def named(kind: int, body: bytes = b"") -> bytes:
    return old_frame(kind, struct.pack("<I", len(NAME)) + NAME + body)


def old_get(subscriber: bytes, max_blocking_s: int = 0) -> bytes:
    frame = old_frame(5, subscriber + struct.pack("<i", max_blocking_s))
    assert (frame[4:8], len(frame)) == (b"\x18\0\0\0", 28)
    return frame


def translate(data: bytes) -> bytes:
    """Return a stream of whole frames in the second framing."""
    found, at = b"", 0
    while len(data) - at >= 8:
        kind, length = struct.unpack_from("<II", data, at)
        excess = 4 if kind == 5 else 8
        if length > 0xFFFFFFFF - excess:
            break
        found += struct.pack("<II", kind, length + excess) + data[at + 8 : at + 8 + length]
        at += 8 + length
    return found


def scanner() -> RequestScanner:
    return RequestScanner(CAP, oracle.is_name, with_header=True)


@given(streams)
def test_requests_are_those_of_the_oracle(data):
    old = translate(data)
    consumed, expected = oracle.scan(old, CAP, with_header=True)
    scanned = scanner().scan(old, 0, len(old))
    assert (scanned.consumed, ones(scanned.groups)) == (consumed, expected)
    assert expected == oracle.scan(data, CAP)[1]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (struct.pack("<II", 0, 7), TOO_SHORT),
        (struct.pack("<II", 6, 0), TOO_SHORT),
        (struct.pack("<II", 5, 3), TOO_SHORT),
        (struct.pack("<II", 4, CAP + 9), TOO_LARGE),
        (struct.pack("<II", 5, CAP + 5), TOO_LARGE),
    ],
)
def test_impossible_length_ends_the_stream(header: bytes, reason: str):
    data = header + bytes(64)
    scanned = scanner().scan(data, 0, len(data))
    assert [(group.reason, group.closes) for group in scanned.groups] == [(reason, True)]  # type: ignore[union-attr]
    assert (scanned.bad, scanned.consumed) == (True, 0)


def test_length_at_the_limit_is_taken():
    for kind, excess in ((9, 8), (5, 4)):
        data = struct.pack("<II", kind, CAP + excess) + bytes(CAP)
        assert scanner().scan(data, 0, len(data)).consumed == len(data)


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as folder:
        listen = (
            f"freud=unix:{folder}/old.sock?length=with-header",
            f"freud=unix:{folder}/new.sock",
        )
        with serve(listen=listen, folder=Path(folder)) as one:
            yield one


def connect(bus: BusProcess, name: str) -> freud_client.Client:
    folder = Path(bus.address("freud").path).parent
    return freud_client.connect(Address("unix", path=str(folder / name)))


def ask(client: freud_client.Client, *requests: bytes) -> list[Answer]:
    client.send(*requests)
    return client.answers(len(requests))


@pytest.mark.sabotage("one-framing", expects="no answer in the older framing")
def test_older_client_works_on_its_listener_and_shares_topics_with_the_others(bus: BusProcess):
    with connect(bus, "old.sock") as old, connect(bus, "new.sock") as new:
        old.send(named(0))
        assert old.has_answer(within_s=10), "no answer in the older framing"
        (created,) = old.answers(1)
        (subscribed,) = ask(old, named(2))
        assert (created.code, subscribed.code) == (OK, OK)
        key = subscribed.payload
        assert new.ask(freud_client.produce(NAME, b"from new")).code == OK
        assert ask(old, named(4, b"from old"), old_get(key), old_get(key)) == [
            Answer(OK, (1).to_bytes(8, "little")),
            Answer(OK, b"from new"),
            Answer(OK, b"from old"),
        ]
        assert old.ask(old_frame(6)).code == OK
        assert old.ask(old_frame(8, key + bytes(4))).code == freud_client.NOTHING_HAPPENED
        assert ask(old, old_frame(3, key), named(1)) == [Answer(OK), Answer(OK)]
        old.send(*(bytes([byte]) for byte in named(0)))
        assert old.answers(1)[0].code == OK


def test_length_without_the_header_is_malformed_and_closes(bus: BusProcess):
    with connect(bus, "old.sock") as client:
        client.send(freud_client.list_topics())
        assert [answer.code for answer in client.to_the_end()] == [freud_client.MALFORMED]
    stats = json.loads(bus.run("stats", "--json").stdout)
    assert stats["refused"]["malformed_too_short"] == 1
