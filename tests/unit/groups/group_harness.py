"""A coordinator with its own store and a manual clock."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from polybus.bus.alarms import Alarms
from polybus.bus.shares import unshared_table
from polybus.durable.topic_registry import DurableTopics
from polybus.groups.coordinator import Coordinator
from polybus.groups.dead_letter_queue import DeadLetterTargets
from polybus.groups.group_records import Member
from polybus.groups.group_state import GroupContext
from polybus.groups.member_fetch import FetchResult, HeldPosition
from polybus.groups.message_block import OutputMessage, build_block, read_messages
from polybus.groups.shard_ends import ShardEnds
from polybus.groups.shard_progress import FailureReport, ShardReport
from polybus.model.topic import Topic
from polybus.native.inprocess.inprocess_bus import StdlibLog
from polybus.store.contract import Store

ASKED = Member(0, 3, 2000, 5000)
MANY = (1 << 20, 1 << 30)  # rows and bytes of a fetch
SECOND_NS = 1_000_000_000


class GroupHarness:
    """A coordinator under test. Tests set `now` and `wall_ns`; `woken` lists changed topics."""

    def __init__(self, store: Store, **limits: int) -> None:
        self.store = store
        self.now = 100.0
        self.wall_ns: Callable[[], int] = lambda: SECOND_NS
        self.woken: list[int] = []
        self.limits = limits
        self.alarms = Alarms(lambda: self.wall_ns(), StdlibLog("tests"))
        self.open()

    def open(self) -> None:
        """Open the coordinator again on the same store, as a restart does."""
        self.durable = DurableTopics(self.store)
        context = GroupContext(
            self.durable,
            ShardEnds(self.store),
            lambda: self.now,
            lambda: self.wall_ns(),
            self.woken.append,
            DeadLetterTargets(
                lambda topic: self._dead_letters(topic), self.alarms, lambda: self.now
            ),
        )
        max_groups = self.limits.get("max_groups", 1024)
        shares = unshared_table("max_groups", max_groups)
        self.groups = Coordinator(context, shares, self.limits.get("max_members", 1024))

    def topic(self, name: str = "t", shards: int = 4) -> Topic:
        topic = self.durable.find(name)
        if topic is None:
            topic = self.store.create(name, shards, {})
            self.durable.register(topic)
        return topic

    def reshard(self, shards: int, name: str = "t") -> Topic:
        topic = self.store.configure(name, self.topic(name).settings, add_shards=shards)
        self.durable.register(topic)
        self.groups.add_generation(topic)
        return topic

    def produce(self, count: int, shard: int = 0, topic: str = "t", key: str | None = None) -> None:
        from polybus.model.commit import Append, Commit

        number = self.topic(topic).number
        start = self.store.bounds(number).shards[shard].end
        messages = [OutputMessage(key, b"%d" % (start + n), [("h", b"1")], 7) for n in range(count)]
        block = build_block(messages)
        self.durable.commit(Commit(appends=(Append(number, shard, block),))).result()

    def join(
        self, consumer: str, group: str = "g", start: str = "earliest", **asked: int
    ) -> HarnessMember:
        member = self.groups.join(
            self.topic(), group, consumer, Member(**{**_fields(ASKED), **asked}), start
        )
        return HarnessMember(self, group, consumer, member.epoch)

    def info(self, group: str = "g") -> dict[str, Any]:
        return self.groups.info(self.topic(), group)

    def shard(self, number: int, group: str = "g") -> dict[str, Any]:
        shard: dict[str, Any] = self.info(group)["shards"][number]
        return shard

    def letters(self, topic: str = "t.dlq") -> list[OutputMessage]:
        queue = self.durable.find(topic)
        if queue is None:
            return []
        return [letter for _, letter in read_messages(self.store.read(queue.number, "all", 1))]

    def _dead_letters(self, topic: Topic) -> Topic:
        return self.topic(topic.name + ".dlq", len(topic.open_shards))


class HarnessMember:
    """One member and its view of its shards."""

    def __init__(self, harness: GroupHarness, group: str, consumer: str, epoch: int) -> None:
        self.harness, self.group, self.consumer, self.epoch = harness, group, consumer, epoch
        self.held: dict[int, HeldPosition] = {}
        self.rows: dict[int, list[int]] = {}  # offsets by shard, in the order of delivery

    @property
    def who(self) -> tuple[Topic, str, str, int]:
        return self.harness.topic(), self.group, self.consumer, self.epoch

    def look(self, bounds: tuple[int, int] = MANY) -> FetchResult:
        member = self.consumer, self.epoch
        topic = self.harness.topic()
        return self.harness.groups.open_fetch(topic, self.group, member, self.held, bounds).poll()

    def fetch(self, bounds: tuple[int, int] = MANY) -> FetchResult:
        """Poll and apply the result."""
        result = self.look(bounds)
        for number in result.lost:
            del self.held[number]
            self.rows.pop(number, None)
        for assignment in result.assigned:
            number = assignment["shard"]
            self.held[number] = HeldPosition(assignment["epoch"], assignment["low"])
            self.rows[number] = []
        offsets = memoryview(result.rows.offsets).cast("B").cast("q").tolist()
        for place in result.places:
            number, count = place["shard"], place["to"] - place["from"]
            self.held[number] = self.held[number]._replace(next=place["to"])
            assert offsets[:count] == list(range(place["from"], place["to"]))
            self.rows[number] += offsets[:count]
            del offsets[:count]
        assert not offsets
        return result

    def ack(self, shard: int, *acked: tuple[int, int], **more: Any) -> dict[str, Any]:
        (response,) = self.ack_all(self.entry(shard, *acked, **more))
        return response

    def entry(self, shard: int, *acked: tuple[int, int], **more: Any) -> ShardReport:
        epoch = more.pop("epoch", None)
        if epoch is None:
            epoch = self.held[shard].epoch if shard in self.held else 0
        return ShardReport(shard, epoch, acked, **more)

    def ack_all(self, *entries: ShardReport) -> list[dict[str, Any]]:
        return self.harness.groups.ack(*self.who, entries)

    def fail(self, shard: int, offset: int, attempt: int | None = None) -> dict[str, Any]:
        return self.ack(shard, failed=(FailureReport(offset, "no good", attempt),))

    def beat(self, running: dict[int, tuple[int, ...]] | None = None) -> tuple[list[int], ...]:
        return self.harness.groups.heartbeat(*self.who, running or {})

    def leave(self, *entries: ShardReport) -> None:
        self.harness.groups.leave(*self.who, entries)

    def release_all(self) -> None:
        """Release every shard that the bus wants back."""
        for number in self.fetch().release:
            assert self.ack(number, release=True)["error"] is None

    @property
    def owns(self) -> list[int]:
        shards = self.harness.info(self.group)["shards"]
        return [shard["shard"] for shard in shards if shard["owner"] == self.consumer]


def encoded(body: bytes) -> str:
    return base64.b64encode(body).decode()


def bodies(batch: pa.RecordBatch) -> list[bytes]:
    column: list[bytes] = batch.column("body").to_pylist()
    return column


def _fields(member: Member) -> dict[str, int]:
    return {name: getattr(member, name) for name in Member.__slots__}
