"""Random programs of the bus: kernel and oracle agree after any sequence of operations.

Readers of three encodings come, go, fill up, move apart and change their topics, of
which some are durable; sources of several identity classes publish in two dialects'
frames and without any; the policy changes its mind, with and without saying so.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.property.kernel import frames
from tests.property.kernel.twins import EncodingPair, Twins
from tests.rig.oracle.fanout import CONTROL_FRAME, FRAGMENTS_FIRST

# Any two may hold the same body differently: whole or in PARTs.
CAPS = {0: frames.SMALL_CAP, 7: frames.MIDDLE_CAP, 31: frames.LARGE_CAP}
IDENTITIES = (0, 1, 300)
NOT_ALLOWED = (b"", b"x" * 256)
FLAGS = ("set_collect", "set_hold", "set_durable")
MANY = 150  # more than the topic table holds at first

# Explaining a failure traces every line, which takes minutes here.
PHASES = tuple(set(Phase) - {Phase.explain})

indexes = st.integers(0, 999)
names = st.sampled_from(frames.TOPICS)
seeds = st.integers(0, 9)
containers = st.sampled_from((bytes, bytearray, memoryview))
bodies = st.lists(
    st.binary(max_size=12) | st.builds(frames.filler, st.integers(0, 900)), max_size=4
)


def many_names(seed: int) -> list[bytes]:
    chance = Random(seed)
    return [chance.randbytes(chance.choice((2, 8, 9, 255))) for _ in range(MANY)]


class Programs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.denied: set[tuple[int, bytes]] = set()
        self.twins = Twins(lambda identity, topic: (identity, topic) not in self.denied)
        self.encodings = [EncodingPair(number, cap) for number, cap in CAPS.items()]
        self.sources = [self.twins.source(identity) for identity in IDENTITIES]
        self.sources.append(self.twins.source(IDENTITIES[0], trusted=True))
        self.steps = 0

    @initialize(data=st.data())
    def first_readers(self, data: st.DataObject) -> None:
        for encoding in (0, 0, 1, 2):
            self.join(encoding, data.draw(st.sets(names, min_size=1)))

    def reader(self, index: int):
        return self.twins.readers[index % len(self.twins.readers)]

    def has_readers(self) -> bool:
        return bool(self.twins.readers)

    # --- readers -------------------------------------------------------------

    @rule(encoding=indexes, topics=st.sets(names, max_size=4))
    def join(self, encoding: int, topics: set[bytes]) -> None:
        reader = self.twins.join(self.encodings[encoding % len(CAPS)])
        for topic in sorted(topics):
            self.twins.call("subscribe", reader, topic)

    @precondition(has_readers)
    @rule(index=indexes)
    def leave(self, index: int) -> None:
        reader = self.reader(index)
        self.twins.leave(reader)

    @precondition(has_readers)
    @rule(index=indexes, name=names)
    def subscribe(self, index: int, name: bytes) -> None:
        self.twins.call("subscribe", self.reader(index), name)
        self.twins.call("is_subscribed", self.reader(index), name)

    @precondition(has_readers)
    @rule(index=indexes, name=names)
    def unsubscribe(self, index: int, name: bytes) -> None:
        self.twins.call("unsubscribe", self.reader(index), name)

    @precondition(has_readers)
    @rule(index=indexes)
    def unsubscribe_all(self, index: int) -> None:
        self.twins.call("unsubscribe_all", self.reader(index))

    @precondition(has_readers)
    @rule(index=indexes, seed=seeds)
    def subscribe_to_many(self, index: int, seed: int) -> None:
        for name in many_names(seed):
            self.twins.call("subscribe", self.reader(index), name)

    @precondition(has_readers)
    @rule(index=indexes, seed=seeds, order=seeds)
    def unsubscribe_from_many(self, index: int, seed: int, order: int) -> None:
        shuffled = many_names(seed)
        Random(order).shuffle(shuffled)
        for name in shuffled[: MANY * 2 // 3]:
            self.twins.call("unsubscribe", self.reader(index), name)

    @precondition(has_readers)
    @rule(index=indexes, full=st.booleans())
    def set_full(self, index: int, full: bool) -> None:
        self.twins.call("set_full", self.reader(index), full)

    @precondition(has_readers)
    @rule(index=indexes)
    def nobody_is_full(self, index: int) -> None:
        for reader in self.twins.readers:
            self.twins.call("set_full", reader, False)

    @precondition(has_readers)
    @rule(index=indexes, name=names, verb=st.sampled_from(("detach", "attach")))
    def move_apart_and_back(self, index: int, name: bytes, verb: str) -> None:
        self.twins.call(verb, self.reader(index), name)
        self.twins.call("is_subscribed", self.reader(index), name)

    # --- topics and policy ---------------------------------------------------

    @rule(name=names, flag=st.sampled_from(FLAGS), value=st.booleans())
    def set_flag(self, name: bytes, flag: str, value: bool) -> None:
        self.twins.call(flag, name, value)

    @rule(name=names, next_id=st.integers(0, 2**63))
    def set_next_id(self, name: bytes, next_id: int) -> None:
        self.twins.call("set_next_id", name, next_id)

    @rule(identity=st.sampled_from(IDENTITIES), name=names, announced=st.booleans())
    def change_policy(self, identity: int, name: bytes, announced: bool) -> None:
        """Change the policy. Cached verdicts stay unless the change is announced."""
        self.denied ^= {(identity, name)}
        if announced:
            self.twins.call("forget_verdicts")

    @rule(name=st.sampled_from(NOT_ALLOWED))
    def names_that_are_not_allowed(self, name: bytes) -> None:
        self.twins.call("set_collect", name, True)
        self.twins.call("set_next_id", name, 1)
        for reader in self.twins.readers[:1]:
            self.twins.call("subscribe", reader, name)
            self.twins.call("unsubscribe", reader, name)
        self.twins.check([name])

    @rule(value=st.booleans())
    def has_produce_rules(self, value: bool) -> None:
        self.twins.set_judge_unheard(value)

    # --- messages ------------------------------------------------------------

    @rule(
        own=st.integers(0, 1),
        source=indexes,
        data=st.data(),
        container=containers,
        before=st.binary(max_size=3),
        after=st.binary(max_size=3),
    )
    def route(self, own, source, data, container, before, after) -> None:
        stream = data.draw(frames.streams(self.encodings[own].kernel.max_payload))
        buffer = container(before + stream + after)
        at, end = len(before), len(before) + len(stream)
        stop = CONTROL_FRAME
        while stop in (CONTROL_FRAME, FRAGMENTS_FIRST):
            routed = self.twins.route(
                self.encodings[own], self.sources[source % len(self.sources)], buffer, at, end
            )
            at += routed.consumed
            stop = routed.stop

    @rule(source=indexes, seed=seeds, own=st.integers(0, 1))
    def route_to_many(self, source: int, seed: int, own: int) -> None:
        stream = b"".join(frames.publish(name, name[:3]) for name in many_names(seed))
        self.twins.route(
            self.encodings[own], self.sources[source % len(self.sources)], stream, 0, len(stream)
        )

    @rule(
        source=indexes,
        name=names,
        bodies=bodies,
        skip=st.none() | st.integers(0, 2),
    )
    def publish(self, source: int, name: bytes, bodies: list[bytes], skip: int | None) -> None:
        skipped = None if skip is None else self.encodings[skip]
        self.twins.publish(self.sources[source % len(self.sources)], name, bodies, skipped)

    @precondition(has_readers)
    @rule(index=indexes, name=names | st.sampled_from(NOT_ALLOWED), bodies=bodies)
    def encode_for(self, index: int, name: bytes, bodies: list[bytes]) -> None:
        self.twins.encode_for(self.reader(index), name, bodies)

    # --- after every step ----------------------------------------------------

    @invariant()
    def all_messages_agree(self) -> None:
        """A word on every topic, twice, so that some runs are long and some short."""
        self.steps += 1
        turn = self.steps % len(frames.TOPICS)
        source = self.sources[self.steps % len(self.sources)]
        topics = frames.TOPICS[turn:] + frames.TOPICS[:turn]
        words = [frames.publish(topic, topic[:5]) for topic in topics for _ in range(2)]
        words.insert(turn, frames.publish_part(topics[0], 0, 2, b"half"))
        stream = b"".join(words)
        at, stop = 0, FRAGMENTS_FIRST
        while stop == FRAGMENTS_FIRST:
            encoding = self.encodings[self.steps % 2]
            routed = self.twins.route(encoding, source, stream, at, len(stream))
            at, stop = at + routed.consumed, routed.stop
        skip = (None, *self.encodings)[self.steps % 4]
        self.twins.publish(source, topics[-1], [b"", frames.filler(300)], skip)

    @invariant()
    def all_answers_agree(self) -> None:
        self.twins.check(frames.TOPICS)


Programs.TestCase.settings = settings(max_examples=40, stateful_step_count=30, phases=PHASES)
TestPrograms = pytest.mark.timeout(300)(Programs.TestCase)
