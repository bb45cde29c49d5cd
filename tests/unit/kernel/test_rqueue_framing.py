"""rqueue's frames as the server reads them: golden vectors, every reason, exact bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polybus.dialects.rqueue.server.rqueue_framing import REASONS, RqueueEncoding, RqueueFraming
from polybus.kernel.fanout import BAD_FRAME, CONTROL_FRAME, END, Fanout, RouteResult, Source
from tests.property.kernel import frames
from tests.rig.oracle import rqueue as oracle

VECTORS_FILE = Path(__file__).parents[2] / "vectors" / "rqueue.json"
VECTORS = json.loads(VECTORS_FILE.read_text())
FROM_CLIENTS = [one for one in VECTORS["vectors"] if one["sender"] == "client"]
CONTROLS = {"subscribe": 1, "remove": 2, "deregister": 5}


def by_name(vector: dict[str, Any]) -> str:
    return str(vector["name"])


class Bus:
    """One reader of one topic, and a publisher."""

    def __init__(self, topic: bytes = b"t", max_payload: int = 2048) -> None:
        encoding = RqueueEncoding(0, max_payload)
        self.framing = RqueueFraming(encoding)
        self.fanout = Fanout(lambda identity, topic: True)
        self.source = Source(0)
        self.fanout.subscribe(self.fanout.add_subscriber("reader", encoding), topic)

    def route(self, data: bytes) -> RouteResult:
        return self.fanout.route(self.framing, self.source, data, 0, len(data))


def reason(routed: RouteResult) -> str:
    assert routed.stop == BAD_FRAME
    return REASONS[routed.code]


def test_reason_names_are_stable() -> None:
    """Logs and counters carry them: other programs rely on the words."""
    assert REASONS == (
        "payload_too_large",
        "unknown_type",
        "not_for_server",
        "inner_length",
        "inner_type",
        "topic_length",
        "trailing_bytes",
        "deregister_not_empty",
        "part_length",
        "part_index",
    )


def test_vectors_cover_every_reason() -> None:
    assert {one["bad"] for one in FROM_CLIENTS if "bad" in one} == set(REASONS)


@pytest.mark.parametrize("vector", [one for one in FROM_CLIENTS if "bad" in one], ids=by_name)
def test_bad_vectors(vector: dict[str, Any]) -> None:
    """A bad frame has its reason; frames before it are delivered, later ones are not."""
    bus, before, bad = Bus(), frames.publish(b"t", b"before"), bytes.fromhex(vector["frame"])
    routed = bus.route(before + bad + frames.publish(b"t", b"after"))
    assert reason(routed) == vector["bad"]
    assert routed.consumed == len(before)
    assert routed.outputs == [("reader", frames.notification(b"t", b"before"))]
    with pytest.raises(oracle.Bad, match=vector["bad"]):
        oracle.first_frame(bad, VECTORS["max_payload"])


@pytest.mark.parametrize("vector", [one for one in FROM_CLIENTS if "value" in one], ids=by_name)
def test_good_vectors(vector: dict[str, Any]) -> None:
    value, frame = vector["value"], bytes.fromhex(vector["frame"])
    topic = bytes.fromhex(value.get("topic", ""))
    bus = Bus(topic or b"t")
    routed = bus.route(frame)
    assert routed.consumed == len(frame)
    if value["type"] in CONTROLS:
        assert (routed.stop, routed.code) == (CONTROL_FRAME, CONTROLS[value["type"]])
        assert (routed.topic, routed.outputs) == (topic, [])
    else:
        assert (routed.stop, routed.code) == (END, 0)
        assert routed.outputs == [("reader", frame[5:])]


@pytest.mark.parametrize("vector", [one for one in FROM_CLIENTS if "value" in one], ids=by_name)
def test_incomplete_frame_is_left_unconsumed(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame"])
    for size in range(len(frame)):
        routed = Bus().route(frame[:size])
        assert (routed.stop, routed.consumed, routed.outputs) == (END, 0, [])


@pytest.mark.parametrize("max_payload", [282, 2048, 65536])
def test_max_payload_is_exact(max_payload: int) -> None:
    bus = Bus(max_payload=max_payload)
    largest = frames.publish_of_length(b"t", max_payload)
    assert bus.route(largest).outputs == [("reader", largest[5:])]
    assert reason(bus.route(frames.publish_of_length(b"t", max_payload + 1))) == REASONS[0]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("00000801 00", "payload_too_large"),
        ("ffffffff 00", "payload_too_large"),
        ("80000000 01", "payload_too_large"),
        ("00000010 03", "unknown_type"),
        ("00000010 ff", "unknown_type"),
        ("00000010 07", "not_for_server"),
        ("00000010 08", "not_for_server"),
        ("00000001 05", "deregister_not_empty"),
    ],
)
def test_bad_header_is_rejected_before_its_payload_arrives(header, expected) -> None:
    assert reason(Bus().route(bytes.fromhex(header))) == expected


@pytest.mark.parametrize("kind", range(256))
def test_every_type(kind: int) -> None:
    """With an empty payload: only DEREGISTER is whole then, under both of its numbers."""
    routed = Bus().route(frames.frame(kind, b""))
    if kind in (2, 5):
        assert (routed.stop, routed.code, routed.topic) == (CONTROL_FRAME, 5, b"")
        return
    expected = {0: "inner_length", 1: "topic_length"} | dict.fromkeys((7, 8), "not_for_server")
    assert reason(routed) == expected.get(kind, "unknown_type")


@pytest.mark.parametrize("kind", sorted(set(range(256)) - {7, 8}))
def test_every_other_type_inside_a_publish(kind: int) -> None:
    inner = frames.frame(kind, frames.named(b"t"))
    assert reason(Bus().route(frames.frame(0, inner))) == "inner_type"


@pytest.mark.parametrize(("index", "count"), [(0, 1), (255, 256), (65534, 65535)])
def test_last_part_is_valid(index: int, count: int) -> None:
    assert Bus().route(frames.publish_part(b"t", index, count, b"")).stop == END


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (256, 255), (65535, 65535)])
def test_part_beyond_the_last_is_rejected(index: int, count: int) -> None:
    assert reason(Bus().route(frames.publish_part(b"t", index, count, b""))) == "part_index"


def test_control_frames_are_handled_in_order() -> None:
    bus = Bus()
    first, second = frames.publish(b"t", b"1"), frames.publish(b"t", b"2")
    stream = first + frames.remove(b"t") + second
    routed = bus.route(stream)
    assert (routed.stop, routed.code, routed.topic) == (CONTROL_FRAME, 2, b"t")
    assert routed.outputs == [("reader", first[5:])]
    assert routed.consumed == len(stream) - len(second)
    bus.fanout.unsubscribe(0, routed.topic)
    assert bus.route(stream[routed.consumed :]).outputs == []


def test_framing_uses_the_max_payload_of_its_encoding() -> None:
    encoding = RqueueEncoding(4, 999)
    framing = RqueueFraming(encoding)
    assert framing.own is encoding
    assert framing.max_payload == 999


def test_framing_must_have_an_encoding() -> None:
    with pytest.raises(TypeError):
        RqueueFraming(None)  # type: ignore[arg-type]
