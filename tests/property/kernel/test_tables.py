"""Large tables of the fan-out grow, shrink and drop entries correctly."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.kernel import frames
from tests.property.kernel.twins import EncodingPair, SourcePair, Twins

# From 256 slots, at most half full, to 4096: four doublings.
MANY_TOPICS = 1500
IDLE_TOPICS = 4096  # as many are remembered for their verdicts alone
MANY_READERS = 150  # from places for 64 to places for 256

randoms = st.integers(0, 2**32).map(Random)


def everybody_may(identity: int, topic: bytes) -> bool:
    return True


def random_topics(chance: Random, count: int) -> list[bytes]:
    """Distinct names; many short ones, which differ in a byte, and some of the longest."""
    names = {chance.randbytes(chance.choice((2, 3, 7, 8, 9, 16, 255))) for _ in range(count)}
    return sorted(names, key=lambda name: (len(name), name))


def send_all(twins: Twins, own: EncodingPair, source: SourcePair, topics: list[bytes]) -> None:
    stream = b"".join(frames.publish(topic, topic[-2:]) for topic in topics)
    twins.route(own, source, stream, 0, len(stream))


@settings(max_examples=8)
@given(chance=randoms)
def test_topics_are_added_and_removed_in_any_order(chance: Random) -> None:
    twins, own = Twins(everybody_may), EncodingPair(0, frames.LARGE_CAP)
    source, readers = twins.source(0), [twins.join(own), twins.join(own)]
    topics = random_topics(chance, MANY_TOPICS)
    chance.shuffle(topics)
    for topic in topics:
        twins.call("subscribe", chance.choice(readers), topic)
    send_all(twins, own, source, topics)
    while any(twins.oracle.subscription_count(reader.oracle) for reader in readers):
        for topic in chance.sample(topics, len(topics) // 3):
            for reader in readers:
                twins.call("unsubscribe", reader, topic)
        send_all(twins, own, source, topics)
        twins.check(topics)
        topics = [topic for topic in topics if chance.random() < 0.5] or topics[:2]
        if len(topics) < 20:
            twins.call("unsubscribe_all", readers[0])
            twins.call("unsubscribe_all", readers[1])
    assert twins.kernel.topic_count == 0


@settings(max_examples=3)
@given(chance=randoms)
def test_idle_topics_are_swept_and_read_ones_kept(chance: Random) -> None:
    twins, own = Twins(lambda identity, topic: topic[0] % 3 > 0), EncodingPair(0, 2048)
    twins.set_judge_unheard(True)
    source, reader = twins.source(1), twins.join(own)
    topics = random_topics(chance, IDLE_TOPICS + 1500)
    chance.shuffle(topics)
    for topic in topics[::40]:
        twins.call("subscribe", reader, topic)
    for topic in topics[7::100]:
        twins.call("set_collect", topic, True)
    for _ in range(2):
        send_all(twins, own, source, topics)
        send_all(twins, own, source, chance.sample(topics, 500))
        twins.check(topics[::10])
    assert len(twins.kernel_asked) > len(topics), "some were forgotten, and asked for again"


@pytest.mark.parametrize("spare", [0, 1])
def test_just_as_many_idle_topics_are_remembered(spare: int) -> None:
    twins, own = Twins(everybody_may), EncodingPair(0, frames.LARGE_CAP)
    twins.set_judge_unheard(True)
    topics = [str(number).encode() for number in range(IDLE_TOPICS + spare)]
    send_all(twins, own, twins.source(0), topics)
    send_all(twins, own, twins.source(0), topics[::-1])
    # One too many, and all that were there before it are asked for again.
    assert len(twins.kernel_asked) == len(topics) + spare * IDLE_TOPICS


@settings(max_examples=8)
@given(chance=randoms)
def test_readers_come_and_go_and_their_numbers_are_used_again(chance: Random) -> None:
    twins = Twins(everybody_may)
    encodings = [EncodingPair(number, frames.SMALL_CAP + number) for number in (0, 1, 31)]
    source = twins.source(0)
    topics = random_topics(chance, 12)
    for _ in range(MANY_READERS):
        reader = twins.join(chance.choice(encodings))
        for topic in chance.sample(topics, chance.randrange(len(topics))):
            twins.call("subscribe", reader, topic)
    for _ in range(6):
        send_all(twins, chance.choice(encodings), source, topics)
        twins.check(topics)
        for reader in chance.sample(twins.readers, len(twins.readers) * 2 // 3):
            twins.leave(reader)
        for _ in range(chance.randrange(20)):
            twins.call("subscribe", twins.join(chance.choice(encodings)), chance.choice(topics))
    numbers = [reader.kernel for reader in twins.readers]
    assert all(number < MANY_READERS for number in numbers)
    for reader in list(twins.readers):
        twins.leave(reader)
    assert (twins.kernel.topic_count, twins.kernel.set_count) == (0, 0)


@settings(max_examples=10)
@given(chance=randoms)
def test_each_identity_class_is_judged_by_itself(chance: Random) -> None:
    denied = {chance.randrange(1000) for _ in range(400)} | {65535}
    twins = Twins(lambda identity, topic: identity not in denied)
    own = EncodingPair(0, frames.LARGE_CAP)
    twins.call("subscribe", twins.join(own), b"topic")
    identities = [*chance.sample(range(1000), 60), 65535]
    for announced in (False, True):
        chance.shuffle(identities)
        for identity in identities:
            for _ in range(2):
                send_all(twins, own, twins.source(identity), [b"topic"])
        if announced:
            denied.clear()
            twins.call("forget_verdicts")
    assert len(twins.kernel_asked) == len(identities)
    send_all(twins, own, twins.source(identities[0]), [b"topic"])
    assert len(twins.kernel_asked) == len(identities) + 1
