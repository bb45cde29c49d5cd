"""Fan-out examples: outputs, blocked publishers, counters."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding, RqueueFraming
from polybus.kernel.fanout import BLOCKED, CONTROL_FRAME, END, FRAGMENTS_FIRST, Fanout, Source
from polybus.kernel.framing import Framing
from tests.property.kernel.frames import notification, publish, publish_part, subscribe

OWN = RqueueEncoding(0, 2048)
FRAMING = RqueueFraming(OWN)
OTHER = RqueueEncoding(5, 282)


def fanout_of(*readers: tuple[str, RqueueEncoding, str]) -> Fanout:
    """Readers as (outbox, encoding, topics), each topic one letter."""
    fanout = Fanout(lambda identity, topic: topic != b"forbidden")
    for outbox, encoding, topics in readers:
        number = fanout.add_subscriber(outbox, encoding)
        for topic in topics:
            fanout.subscribe(number, topic.encode())
    return fanout


def route(fanout: Fanout, data: Any, source: Source | None = None) -> Any:
    return fanout.route(FRAMING, source or Source(0), data, 0, len(data))


# --- outputs -----------------------------------------------------------------


def test_one_run_is_one_object_for_all_subscribers() -> None:
    """The common case costs one copy, however many readers there are."""
    fanout = fanout_of(("a", OWN, "xy"), ("b", OWN, "xy"))
    routed = route(fanout, publish(b"x", b"1") + publish(b"y", b"2"))
    (a, first), (b, second) = routed.outputs
    assert {a, b} == {"a", "b"}
    assert first == notification(b"x", b"1") + notification(b"y", b"2")
    assert first is second


def test_several_runs_are_one_output_per_subscriber() -> None:
    fanout = fanout_of(("a", OWN, "x"), ("b", OWN, "xy"), ("c", OWN, "z"))
    stream = publish(b"x", b"1") + publish(b"y", b"2") + publish(b"x", b"3")
    routed = route(fanout, stream)
    assert dict(routed.outputs) == {
        "a": notification(b"x", b"1") + notification(b"x", b"3"),
        "b": notification(b"x", b"1") + notification(b"y", b"2") + notification(b"x", b"3"),
    }
    assert len(routed.outputs) == 2


def test_each_encoding_gets_its_own_output() -> None:
    fanout = fanout_of(("own", OWN, "x"), ("other", OTHER, "x"))
    body = bytes(300)
    outputs = dict(route(fanout, publish(b"x", body)).outputs)
    assert outputs["own"] == notification(b"x", body)
    assert outputs["other"][4] == 8
    assert fanout.delivered == 2
    assert fanout.delivered_bytes == sum(map(len, outputs.values()))


def test_fragments_of_a_collected_topic_are_returned_to_the_session() -> None:
    fragment = publish_part(b"x", 0, 2, b"half")
    body = fragment[5 + 5 + 2 :]
    own_only = fanout_of(("own", OWN, "x"))
    assert list(route(own_only, fragment).fragments) == []
    mixed = fanout_of(("own", OWN, "x"), ("other", OTHER, "x"))
    routed = route(mixed, fragment)
    assert routed.fragments == [(b"x", body)]
    assert routed.outputs == [("own", fragment[5:])]
    collecting = fanout_of()
    collecting.set_collect(b"x", True)
    routed = route(collecting, fragment)
    assert routed.fragments == [(b"x", body)]

    whole = publish(b"y", b"may not overtake it")
    routed = route(collecting, whole + fragment + fragment + whole)
    assert (routed.stop, routed.consumed) == (FRAGMENTS_FIRST, len(whole + fragment + fragment))
    assert routed.fragments == [(b"x", body)] * 2
    assert route(own_only, fragment + whole).stop == END
    assert list(routed.collected) == []


def test_collected_messages_are_columns() -> None:
    fanout = fanout_of(("a", OWN, "x"))
    fanout.set_collect(b"x", True)
    fanout.set_collect(b"y", True)
    fanout.set_next_id(b"x", 7)
    stream = publish(b"x", b"one") + publish(b"y", b"") + publish(b"x", b"three")
    routed = route(fanout, stream)
    columns = {batch.topic: batch for batch in routed.collected}
    assert (columns[b"x"].first_id, columns[b"x"].count) == (7, 2)
    assert columns[b"x"].bodies == b"onethree"
    assert array("i", columns[b"x"].offsets).tolist() == [0, 3, 8]
    assert (columns[b"y"].first_id, columns[b"y"].count, columns[b"y"].bodies) == (0, 1, b"")
    assert (fanout.next_id(b"x"), fanout.next_id(b"y")) == (9, 1)
    again = route(fanout, publish(b"x", b"4")).collected
    assert [(batch.first_id, batch.bodies) for batch in again] == [(9, b"4")]


def test_collected_columns_can_be_published() -> None:
    fanout = fanout_of(("other", OTHER, "x"))
    fanout.set_collect(b"x", True)
    (batch,) = route(fanout, publish(b"x", b"one") + publish(b"x", b"two")).collected
    routed = fanout.publish(Source(0), b"x", batch.offsets, batch.bodies)
    assert routed.consumed == 2
    assert routed.outputs == [("other", notification(b"x", b"one") + notification(b"x", b"two"))]


def test_a_million_tiny_messages_in_one_buffer() -> None:
    fanout = fanout_of(("a", OWN, "x"))
    frame = publish(b"x", b"")
    routed = route(fanout, frame * 1_000_000)
    assert routed.outputs == [("a", frame[5:] * 1_000_000)]
    assert fanout.next_id(b"x") == fanout.messages == 1_000_000


# --- counters ----------------------------------------------------------------


def test_counters_cover_every_message() -> None:
    fanout, source = fanout_of(("a", OWN, "x"), ("b", OWN, "x")), Source(3)
    fanout.has_produce_rules = True
    stream = publish(b"x", b"12") + publish(b"unread", b"345") + publish(b"forbidden", b"6")
    route(fanout, stream, source)
    assert (source.messages, source.bytes, source.denied, source.unheard) == (3, 6, 1, 1)
    assert (fanout.messages, fanout.bytes, fanout.denied, fanout.unheard) == (3, 6, 1, 1)
    size = len(notification(b"x", b"12"))
    assert (fanout.delivered, fanout.delivered_bytes) == (2, 2 * size)
    assert fanout.sent_totals(0) == fanout.sent_totals(1) == (1, size)
    route(fanout, stream, Source(3))
    assert source.messages == 3
    assert fanout.messages == 6


@pytest.mark.parametrize("identity", [65536, 2**32 - 1])
def test_identity_classes_are_bounded(identity: int) -> None:
    with pytest.raises(ValueError, match="identity class"):
        Source(identity)
    assert Source(65535).identity == 65535


# --- full readers ------------------------------------------------------------


def test_full_subscriber_stops_the_first_message_for_it() -> None:
    fanout, source = fanout_of(("a", OWN, "xy"), ("b", OWN, "y")), Source(0)
    fanout.set_full(1, True)
    first, second = publish(b"x", b"1"), publish(b"y", b"2")
    stream = first + second + first
    routed = route(fanout, stream, source)
    assert (routed.stop, routed.blocker) == (BLOCKED, "b")
    assert routed.consumed == len(first)
    assert routed.outputs == [("a", first[5:])]
    assert source.messages == 1
    fanout.set_full(1, False)
    rest = route(fanout, stream[routed.consumed :], source)
    assert (rest.stop, rest.blocker) == (END, None)
    assert dict(rest.outputs) == {"a": second[5:] + first[5:], "b": second[5:]}


def test_departed_full_subscriber_stops_no_message() -> None:
    fanout = fanout_of(("a", OWN, "x"), ("b", OWN, "x"))
    fanout.set_full(0, True)
    fanout.set_full(0, True)
    fanout.remove_subscriber(0)
    assert route(fanout, publish(b"x", b"1")).stop == END
    fanout.set_full(1, True)
    fanout.set_full(1, False)
    assert route(fanout, publish(b"x", b"1")).stop == END


def test_denied_or_unread_message_does_not_wait_for_a_full_subscriber() -> None:
    fanout = fanout_of(("a", OWN, "x"))
    fanout.subscribe(0, b"forbidden")
    fanout.set_full(0, True)
    routed = route(fanout, publish(b"forbidden", b"") + publish(b"unread", b""))
    assert (routed.stop, fanout.denied, fanout.unheard) == (END, 1, 1)


# --- publish -----------------------------------------------------------------


def bounds(*ends: int) -> array[int]:
    return array("i", ends)


def test_subscribers_that_have_the_message_are_skipped() -> None:
    fanout = fanout_of(("own", OWN, "x"), ("other", OTHER, "x"))
    routed = fanout.publish(Source(0), b"x", bounds(0, 3), b"abc", OWN)
    assert routed.outputs == [("other", notification(b"x", b"abc"))]


def test_skipped_subscribers_do_not_block() -> None:
    fanout = fanout_of(("own", OWN, "x"), ("other", OTHER, "x"))
    fanout.set_full(0, True)
    assert fanout.publish(Source(0), b"x", bounds(0, 3), b"abc", OWN).stop == END
    assert fanout.publish(Source(0), b"x", bounds(0, 3), b"abc").stop == BLOCKED
    fanout.set_full(1, True)
    assert fanout.publish(Source(0), b"x", bounds(0, 3), b"abc", OWN).blocker == "other"


def test_blocked_publish_returns_the_delivered_count() -> None:
    fanout = fanout_of(("a", OWN, "x"))
    fanout.set_full(0, True)
    routed = fanout.publish(Source(0), b"x", bounds(0, 1, 2), b"ab")
    assert (routed.stop, routed.consumed, routed.blocker) == (BLOCKED, 0, "a")


@pytest.mark.parametrize(
    ("offsets", "size"),
    [
        (b"", 0),
        (b"\0\0\0", 0),
        (b"\0\0\0\0\0", 0),
        (bounds(-1, 0), 9),
        (bounds(0, 10), 9),
        (bounds(0, 5, 4, 9), 9),
        (bounds(0, 20, 9), 9),
        (bounds(10), 9),
        (memoryview(b"." + bounds(0, 5).tobytes())[1:], 9),
    ],
)
def test_invalid_offsets_are_rejected(offsets: Any, size: int) -> None:
    fanout, source = fanout_of(("a", OWN, "x")), Source(0)
    with pytest.raises(ValueError, match="offsets"):
        fanout.publish(source, b"x", offsets, bytes(size))
    assert source.messages == 0


def test_offsets_at_the_bounds() -> None:
    fanout = fanout_of(("a", OWN, "x"))
    assert fanout.publish(Source(0), b"x", bounds(9), bytes(9)).consumed == 0
    assert fanout.publish(Source(0), b"x", bounds(4, 4, 9), bytes(9)).consumed == 2
    assert fanout.sent_totals(0) == (2, 7 + 12)


@pytest.mark.parametrize("topic", [b"", b"t" * 256], ids=len)
def test_publish_checks_the_name(topic: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 255"):
        fanout_of().publish(Source(0), topic, bounds(0), b"")


# --- buffers -----------------------------------------------------------------


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview, lambda raw: array("B", raw)])
def test_any_contiguous_buffer_is_accepted(container: Any) -> None:
    fanout = fanout_of(("a", OWN, "x"))
    frame = publish(b"x", b"1")
    assert route(fanout, container(frame)).outputs == [("a", frame[5:])]


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (0, 4), (3, 2), (4, 4), (-2, -1)])
def test_window_outside_the_buffer_is_rejected(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="within the buffer"):
        fanout_of().route(FRAMING, Source(0), b"abc", start, end)


def test_frames_outside_the_window_are_not_read() -> None:
    """Also when the rest of a half frame follows the window."""
    fanout = fanout_of(("a", OWN, "x"))
    frame = publish(b"x", b"12345")
    buffer = frame * 3
    for end in range(len(frame), 2 * len(frame)):
        routed = fanout.route(FRAMING, Source(0), buffer, len(frame), end)
        assert (routed.stop, routed.consumed, routed.outputs) == (END, 0, [])
    whole = fanout.route(FRAMING, Source(0), buffer, len(frame), 2 * len(frame))
    assert (whole.consumed, whole.outputs) == (len(frame), [("a", frame[5:])])


@pytest.mark.parametrize("buffer", [None, "text", 1, [1, 2]], ids=repr)
def test_other_objects_are_rejected_as_buffer(buffer: Any) -> None:
    with pytest.raises(TypeError):
        fanout_of().route(FRAMING, Source(0), buffer, 0, 0)
    with pytest.raises(TypeError):
        fanout_of().publish(Source(0), b"x", buffer, b"")
    with pytest.raises(TypeError):
        fanout_of().publish(Source(0), b"x", bounds(0), buffer)


def test_non_contiguous_buffer_is_rejected() -> None:
    with pytest.raises(BufferError):
        fanout_of().route(FRAMING, Source(0), memoryview(b"abcdef")[::2], 0, 3)


def test_buffers_are_released() -> None:
    """A bytearray must not be resized while its buffer is exported."""
    fanout, buffer = fanout_of(("a", OWN, "x")), bytearray(publish(b"x", b"1"))
    offsets = bytearray(bounds(0, 1))
    route(fanout, buffer)
    fanout.publish(Source(0), b"x", offsets, buffer)
    with pytest.raises(ValueError, match="within"):
        fanout.route(FRAMING, Source(0), buffer, 0, 10_000)
    with pytest.raises(TypeError):
        fanout.publish(Source(0), b"x", offsets, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offsets"):
        fanout.publish(Source(0), b"x", offsets[:3], buffer)
    buffer.clear()
    offsets.clear()


# --- invalid and empty arguments ---------------------------------------------


@pytest.mark.parametrize("nothing", [None, object()], ids=["None", "object"])
def test_arguments_of_wrong_type_are_rejected(nothing: Any) -> None:
    fanout = fanout_of()
    with pytest.raises(TypeError):
        fanout.route(nothing, Source(0), b"", 0, 0)
    with pytest.raises(TypeError):
        fanout.route(FRAMING, nothing, b"", 0, 0)
    with pytest.raises(TypeError):
        fanout.publish(nothing, b"x", bounds(0), b"")
    with pytest.raises(TypeError):
        fanout.publish(Source(0), nothing, bounds(0), b"")


def test_framing_without_an_encoding_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"framing\.own"):
        fanout_of().route(Framing(), Source(0), b"", 0, 0)


def test_empty_buffer_has_no_effect() -> None:
    routed = route(fanout_of(), b"")
    assert (routed.stop, routed.consumed, routed.outputs) == (END, 0, [])
    assert route(fanout_of(), subscribe(b"x")).stop == CONTROL_FRAME
