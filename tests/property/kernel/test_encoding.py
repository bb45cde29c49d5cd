"""Bodies of any size are encoded by the spec, whole or in PARTs, under every cap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding
from tests.property.kernel import frames
from tests.property.kernel.twins import EncodingPair, Twins
from tests.rig.oracle.rqueue import Encoding

caps = st.sampled_from((282, 283, 300, 2048, 70_000)) | st.integers(282, 700)
# Around one, two and three chunks under the smaller caps.
sizes = st.integers(0, 900) | st.integers(0, 3).flatmap(
    lambda chunks: st.integers(max(0, chunks * 282 - 40), chunks * 282 + 40)
)
topics = st.binary(min_size=1, max_size=255)


@settings(max_examples=200)
@given(cap=caps, topic=topics, sizes=st.lists(sizes, max_size=3))
def test_messages_without_frames(cap: int, topic: bytes, sizes: list[int]) -> None:
    twins, encoding = Twins(lambda identity, topic: True), EncodingPair(3, cap)
    for _ in range(2):
        twins.call("subscribe", twins.join(encoding), topic)
    twins.publish(twins.source(0), topic, [frames.filler(size) for size in sizes])
    twins.check([topic])


@settings(max_examples=100)
@given(cap=caps, topic=topics, data=st.data())
def test_every_part_may_be_published_again(cap: int, topic: bytes, data: st.DataObject) -> None:
    """Output under a limit must fit into a PUBLISH under the same limit."""
    twins, encoding = Twins(lambda identity, topic: True), EncodingPair(0, cap)
    twins.call("subscribe", twins.join(encoding), topic)
    body = frames.filler(data.draw(st.integers(cap - 30, 3 * cap) if cap < 5000 else sizes))
    routed = twins.publish(twins.source(0), topic, [body])
    (encoded,) = routed.outputs.values()
    again = b"".join(frames.frame(0, inner) for inner in split(encoded))
    assert twins.route(encoding, twins.source(0), again, 0, len(again)).consumed == len(again)
    assert twins.kernel.unheard == 0


def split(encoded: bytes) -> list[bytes]:
    found = []
    while encoded:
        size = 5 + int.from_bytes(encoded[:4], "big")
        found.append(encoded[:size])
        encoded = encoded[size:]
    return found


numbers = st.integers(0, 3) | st.sampled_from((255, 256, 65534, 65535))
whole_frames = st.builds(frames.notification, topics, st.binary(max_size=30)) | st.builds(
    frames.part, topics, numbers, numbers, st.binary(max_size=30)
)


@given(
    encoded=st.lists(whole_frames, max_size=5)
    .map(b"".join)
    .flatmap(lambda whole: st.sampled_from([whole[:end] for end in range(len(whole) + 1)]))
    | st.binary(max_size=30),
    sent=st.integers(-1, 400),
)
def test_messages_that_were_not_sent_are_counted(encoded: bytes, sent: int) -> None:
    kernel, oracle = RqueueEncoding(0, frames.LARGE_CAP), Encoding(0, frames.LARGE_CAP)
    assert kernel.count(encoded, sent) == oracle.count(encoded, sent)
