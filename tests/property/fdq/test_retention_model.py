"""Random programs of produce, ack, reset and retention, compared with a small model.

The model says for each message whether a limit keeps it and which groups have acked it. After each
run of retention every shard must begin exactly where the model says, and each group must have
counted exactly the messages that were trimmed before it acked them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.bus.alarms import Alarms
from polybus.durable.retention import Retention
from polybus.groups.reader_positions import read_positions
from polybus.native.inprocess.inprocess_bus import StdlibLog
from polybus.store.memory.memory_store import MemoryStore
from tests.unit.groups.group_harness import GroupHarness, HarnessMember

SHARDS = 3
GROUPS = ("g", "h")
MS_NS = 1_000_000

shards = st.integers(0, SHARDS - 1)
groups = st.sampled_from(GROUPS)
limit = st.one_of(st.none(), st.integers(1, 30))
steps = st.one_of(
    st.tuples(st.just("produce"), shards, st.integers(1, 8)),
    st.tuples(st.just("produce"), shards, st.integers(1, 8)),
    st.tuples(st.just("pass"), st.integers(0, 20)),
    st.tuples(st.just("join"), groups, st.sampled_from(("earliest", "latest"))),
    st.tuples(st.just("ack"), groups, shards, st.integers(0, 10), st.integers(1, 10)),
    st.tuples(st.just("ack"), groups, shards, st.just(0), st.integers(1, 10)),
    st.tuples(st.just("reset"), groups),
    st.tuples(st.just("remove"), groups),
    st.tuples(st.just("limits"), limit, limit, st.sampled_from(("keep", "drop"))),
    st.tuples(st.just("retain")),
    st.tuples(st.just("retain")),
)


@dataclass
class ModelGroup:
    """The offsets that a group has acked, and the messages that it lost, by shard."""

    acked: list[set[int]]
    lost: list[int] = field(default_factory=lambda: [0] * SHARDS)

    def low(self, shard: int, start: int) -> int:
        """Return the first offset that it has not acked, of those that are stored."""
        while start in self.acked[shard]:
            start += 1
        return start


class Model:
    """The messages of each shard as (id, time), trimmed ones included, and its groups."""

    def __init__(self) -> None:
        self.messages: list[list[tuple[int, int]]] = [[] for _ in range(SHARDS)]
        self.starts = [0] * SHARDS
        self.groups: dict[str, ModelGroup] = {}
        self.next_id = 1
        self.limits: tuple[int | None, int | None, str] = (None, None, "keep")

    def retain(self, now_ms: int) -> None:
        age_ms, most, unread = self.limits
        for shard, messages in enumerate(self.messages):
            cut = self.starts[shard]
            while cut < len(messages):
                message_id, time_ms = messages[cut]
                is_old = age_ms is not None and time_ms < now_ms - age_ms
                is_beyond = most is not None and message_id < self.next_id - most
                if not is_old and not is_beyond:
                    break
                cut += 1
            if unread == "keep":
                start = self.starts[shard]
                cut = min([cut, *(group.low(shard, start) for group in self.groups.values())])
            for group in self.groups.values():
                trimmed = set(range(self.starts[shard], cut))
                group.lost[shard] += len(trimmed - group.acked[shard])
            self.starts[shard] = cut


class Trial:
    """A program on the real coordinator and retention, and on the model."""

    def __init__(self) -> None:
        self.time_ns = 1_000_000 * MS_NS
        self.harness = GroupHarness(MemoryStore(wall_ns=lambda: self.time_ns))
        self.harness.topic(shards=SHARDS)
        self.harness.wall_ns = lambda: self.time_ns
        log = StdlibLog("tests")
        self.counted = 0
        self.retention = Retention(
            self.harness.durable,
            read_positions,
            Alarms(lambda: self.time_ns, log),
            self._count_unread,
            lambda: 0.0,
            lambda: self.time_ns,
        )
        self.model = Model()
        self.members: dict[str, HarnessMember] = {}

    def _count_unread(self, messages: int) -> None:
        self.counted += messages

    def produce(self, shard: int, count: int) -> None:
        self.harness.produce(count, shard)
        added = [(self.model.next_id + n, self.time_ns // MS_NS) for n in range(count)]
        self.model.messages[shard] += added
        self.model.next_id += count

    def pass_(self, elapsed_ms: int) -> None:
        self.time_ns += elapsed_ms * MS_NS

    def join(self, group: str, start: str) -> None:
        self.members[group] = self.harness.join("a", group=group, start=start)
        self.members[group].fetch()
        if group not in self.model.groups:
            acked = [
                set(range(len(messages))) if start == "latest" else set(range(self.model.starts[n]))
                for n, messages in enumerate(self.model.messages)
            ]
            self.model.groups[group] = ModelGroup(acked)

    def ack(self, group: str, shard: int, skipped: int, count: int) -> None:
        """Ack `count` messages of those that are stored, after the first `skipped`."""
        known = self.model.groups.get(group)
        if known is None:
            return
        self.members[group].fetch()
        first = self.model.starts[shard] + skipped
        end = min(first + count, len(self.model.messages[shard]))
        if first < end:
            assert self.members[group].ack(shard, (first, end))["error"] is None
            known.acked[shard] |= set(range(first, end))

    def reset(self, group: str) -> None:
        known = self.model.groups.get(group)
        if known is None:
            return
        self.harness.groups.reset(self.harness.topic(), group, "earliest", force=True)
        for shard, start in enumerate(self.model.starts):
            known.acked[shard] = set(range(start))

    def remove(self, group: str) -> None:
        if self.model.groups.pop(group, None) is not None:
            self.harness.groups.remove(self.harness.topic(), group, force=True)

    def limits(self, age_ms: int | None, messages: int | None, unread: str) -> None:
        given = {"retain_age_ms": age_ms, "retain_messages": messages, "retain_unread": unread}
        chosen = {name: value for name, value in given.items() if value is not None}
        self.harness.durable.register(self.harness.store.configure("t", chosen))
        self.model.limits = age_ms, messages, unread

    def retain(self) -> None:
        assert not self.retention.run_round()
        before = sum(map(sum, (group.lost for group in self.model.groups.values())))
        self.model.retain(self.time_ns // MS_NS)
        after = sum(map(sum, (group.lost for group in self.model.groups.values())))
        assert self.counted == after - before
        self.counted = 0

    def lost(self, group: str, shard: int) -> int:
        return int(self.harness.shard(shard, group)["trimmed_unread"])

    def check(self) -> None:
        bounds = self.harness.store.bounds(self.harness.topic().number).shards
        found = [(shard.start, shard.end) for shard in bounds]
        ends = map(len, self.model.messages)
        assert found == list(zip(self.model.starts, ends, strict=True))
        for name, group in self.model.groups.items():
            assert [self.lost(name, shard) for shard in range(SHARDS)] == group.lost


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=40))
def test_retention_does_what_the_model_says(program):
    trial = Trial()
    with trial.harness.store:
        for name, *arguments in program:
            getattr(trial, "pass_" if name == "pass" else name)(*arguments)
            trial.check()
