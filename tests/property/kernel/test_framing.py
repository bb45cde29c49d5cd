"""Any bytes, in any cuts: the kernel accepts the frames of the spec and no others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.kernel import frames
from tests.property.kernel.streams import audience, byte_by_byte, cut, told, whole

CAPS = (frames.SMALL_CAP, frames.LARGE_CAP)
places = st.lists(st.integers(0, 4000), max_size=8)


@pytest.mark.parametrize("max_payload", CAPS)
@settings(max_examples=80)
@given(data=st.data(), places=places)
def test_frames_in_random_cuts(max_payload: int, data: st.DataObject, places: list[int]) -> None:
    stream = data.draw(frames.streams(max_payload))
    expected = whole(stream, max_payload)
    assert expected.consumed <= len(stream)
    assert told(audience(max_payload), cut(stream, places)) == expected


def test_message_after_a_fragment_of_its_topic_waits_for_collected_fragments() -> None:
    """A topic that is only relayed ("ab") must not skip the stop for fragments of "a"."""
    stream = b"".join(
        [
            frames.publish_part(b"a", 0, 1, b""),
            frames.publish_part(b"ab", 0, 1, b""),
            frames.publish(b"ab", b""),
        ]
    )
    expected = whole(stream, frames.SMALL_CAP)
    assert expected.consumed == len(stream)
    assert told(audience(frames.SMALL_CAP), byte_by_byte(stream)) == expected


@settings(max_examples=40)
@given(data=frames.streams(frames.SMALL_CAP))
def test_frames_byte_by_byte(data: bytes) -> None:
    expected = whole(data, frames.SMALL_CAP)
    assert told(audience(frames.SMALL_CAP), byte_by_byte(data)) == expected


@settings(max_examples=150)
@given(data=st.binary(max_size=64))
def test_arbitrary_bytes(data: bytes) -> None:
    assert whole(data, frames.SMALL_CAP).consumed <= len(data)


# The bytes after the length decide; a small alphabet reaches all cases.
meaningful = st.sampled_from((0, 0, 0, 1, 2, 3, 5, 7, 8, 9, 21, 22, 27, 255))


@settings(max_examples=200)
@given(payload=st.lists(meaningful, max_size=32).map(bytes), kind=meaningful)
def test_one_frame_of_bytes_that_matter(payload: bytes, kind: int) -> None:
    whole(frames.frame(kind, payload), frames.SMALL_CAP)


@settings(max_examples=200)
@given(payload=st.lists(meaningful, max_size=32).map(bytes), kind=st.sampled_from((7, 8)))
def test_one_publish_of_bytes_that_matter(payload: bytes, kind: int) -> None:
    whole(frames.frame(0, frames.frame(kind, payload)), frames.SMALL_CAP)


@settings(max_examples=60)
@given(
    data=frames.streams(frames.SMALL_CAP),
    before=st.binary(max_size=9),
    after=frames.frames(frames.SMALL_CAP),
)
def test_nothing_outside_the_window_matters(data: bytes, before: bytes, after: bytes) -> None:
    """The rest of a half frame may follow the window; it has not been received yet."""
    connection = audience(frames.SMALL_CAP)
    half = len(after) // 2
    buffer = before + data + after
    start, end = len(before), len(before) + len(data) + half
    assert connection.route(buffer, start, end).consumed <= end - start
