"""Messages of a key keep their order in a group while its topic is resharded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.errors import Expired, Fenced
from polybus.groups.message_block import OutputMessage, build_block, read_messages
from polybus.model.commit import Commit
from polybus.model.shard_routes import split_block
from polybus.store.memory.memory_store import MemoryStore
from tests.unit.groups.group_harness import GroupHarness, HarnessMember

KEYS = 5
STEPS = st.one_of(
    st.tuples(st.just("produce"), st.integers(1, 6)),
    st.tuples(st.just("produce_late"), st.integers(1, 6)),
    st.tuples(st.just("reshard"), st.integers(1, 5)),
    st.tuples(st.just("join"), st.integers(0, 2)),
    st.tuples(st.just("leave"), st.integers(0, 2)),
    st.tuples(st.just("die"), st.integers(0, 2)),
    st.tuples(st.just("fetch"), st.integers(0, 2)),
    st.tuples(st.just("ack"), st.integers(0, 40)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("reset"), st.integers(0, 40)),
)


class Program:
    """A group, its members and a producer."""

    def __init__(self) -> None:
        self.harness = GroupHarness(MemoryStore())
        self.built = self.harness.topic(shards=2)  # as the producer knows it
        self.members: dict[int, HarnessMember] = {}
        self.sent = 0

    def produce(self, count: int) -> None:
        self.built = self.harness.topic()
        self.produce_late(count)

    def produce_late(self, count: int) -> None:
        """Commit a batch that may be split for the shards of an earlier generation."""
        messages = []
        for _ in range(count):
            self.sent += 1
            messages.append(OutputMessage(f"k{self.sent % KEYS}", b"%d" % self.sent, None, 1))
        block = build_block(messages)
        appends = split_block(self.built.number, self.built.open_shards, block, 0)
        self.harness.store.commit(Commit(appends)).result()

    def reshard(self, shards: int) -> None:
        self.harness.reshard(shards)

    def join(self, which: int) -> None:
        self.members[which] = self.harness.join(f"c{which}")

    def leave(self, which: int) -> None:
        if which in self.members:
            self.members.pop(which).leave()

    def die(self, which: int) -> None:
        """Let a member expire. The others stay alive."""
        self.members.pop(which, None)
        for _ in range(2):
            self.harness.now += 3
            for member in self.members.values():
                member.beat()
        self.harness.groups.tick()

    def restart(self, _: int) -> None:
        self.harness.open()
        self.harness.groups.tick()

    def reset(self, at: int) -> None:
        if self.harness.groups.names(self.harness.topic()):
            to = {"id": at % (self.sent + 2)}
            self.harness.groups.reset(self.harness.topic(), "g", to, force=True)

    def fetch(self, which: int) -> None:
        member = self.members.get(which)
        if member is not None:
            for message_id, message in read_messages(member.look().rows):
                self._check_handed(message_id, message.key)
            member.release_all()

    def _check_handed(self, message_id: int, key: str | None) -> None:
        """Check that every earlier message of the key in another shard is acked."""
        topic = self.harness.topic()
        lows = [shard["low"] for shard in self.harness.info()["shards"]]
        rows = self.harness.store.read(topic.number, "all", 1)
        shards = memoryview(rows.shards).cast("B").cast("i").tolist()
        offsets = memoryview(rows.offsets).cast("B").cast("q").tolist()
        read = list(zip(read_messages(rows), shards, offsets, strict=True))
        here = next(shard for (at, _), shard, _ in read if at == message_id)
        for (at, message), shard, offset in read:
            if message.key == key and at < message_id and shard != here:
                assert offset < lows[shard], f"{message.body!r} of shard {shard} is not acked"

    def ack(self, choice: int) -> None:
        """Ack some of the rows that a member holds."""
        owned = [
            (member, shard)
            for member in self.members.values()
            for shard, offsets in member.rows.items()
            if offsets and shard in member.held
        ]
        if owned:
            member, shard = owned[choice % len(owned)]
            offsets = member.rows[shard]
            end = offsets[min(choice, len(offsets) - 1)] + 1
            member.ack(shard, (offsets[0], end))
            member.rows[shard] = [offset for offset in offsets if offset >= end]

    def finish(self) -> None:
        """Ack everything: every shard must open in the end."""
        self.members.clear()
        self.join(0)
        self.harness.now += 100
        self.members[0].beat()
        for _ in range(100):
            self.harness.groups.tick()
            self.fetch(0)
            for shard, offsets in self.members[0].rows.items():
                if offsets and shard in self.members[0].held:
                    self.members[0].ack(shard, (offsets[0], offsets[-1] + 1))
                    self.members[0].rows[shard] = []
            if not sum(shard["lag"] for shard in self.harness.info()["shards"]):
                return
        raise AssertionError(f"messages are left: {self.harness.info()['shards']}")


@settings(deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_keys_are_handed_out_in_order(steps):
    program = Program()
    try:
        for name, argument in steps:
            try:
                getattr(program, name)(argument)
            except (Expired, Fenced):
                program.members.clear()  # another one of its name has replaced a member
        program.finish()
    finally:
        program.harness.store.close()
