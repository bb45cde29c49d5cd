"""The group.* actions: validation, rights, limits, and waiting fetches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from polybus.bus.alarms import Alarms
from polybus.bus.counters import Counters
from polybus.bus.policy import Policy
from polybus.bus.quotas import Quotas
from polybus.bus.rule_table import PlacedRule
from polybus.durable.topic_names import TopicNames
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import (
    Denied,
    DoesNotExist,
    Expired,
    Fenced,
    InvalidTopic,
    LimitReached,
    MalformedRequest,
    Paused,
    TooLarge,
)
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from polybus.model.limits import NativeLimits, QuotaLimits
from polybus.model.rows import Rows
from polybus.model.topic_name import MAX_NAME_BYTES
from polybus.native.port.group_actions import FetchPart
from polybus.native.port.group_entries import MAX_ENTRIES, MAX_RUNNING
from polybus.native.port.native_port import Caller, NativePort
from polybus.native.port.topic_access import TopicAccess
from polybus.store.engine_registry import open_store
from polybus.testing.conformance.sample_blocks import block
from tests.rig.observer import until
from tests.unit.groups.group_harness import encoded

ALICE, BOB, ROOT = Identity(uid=4242), Identity(uid=4343), Identity(uid=0)
LONG_MS = 30_000


class Silent:
    def warning(self, *_args: object, **_fields: object) -> None:
        pass

    debug = info = warning


class World:
    """A native port without a transport, for two callers."""

    def __init__(self, limits: NativeLimits) -> None:
        self.store = open_store("memory:")
        self.policy = Policy()
        durable = DurableTopics(self.store)
        quotas = Quotas(QuotaLimits(), Counters(), Silent())
        binding = TopicNames(durable, self.policy, quotas, lambda name: False)
        access = TopicAccess(durable, binding, self.policy, lambda fn, *args: fn(*args))
        self.alarms = Alarms(time.time_ns, Silent())
        self.port = NativePort(
            access, limits, time.monotonic, dict, _no_rules, time.time_ns, self.alarms
        )
        self.gone = False
        self.alice = self.port.new_caller(ALICE, lambda: self.gone)
        self.bob = self.port.new_caller(BOB, lambda: False)
        self.act("topic.create", topic="t", shards=2)

    def act(self, name: str, **request: Any) -> Mapping[str, Any]:
        return self.port.act(self.alice, name, request)

    def fetch(self, **request: Any) -> tuple[Mapping[str, Any], Rows]:
        return self.fetch_as(self.alice, **request)

    def fetch_as(self, caller: Caller, **request: Any) -> tuple[Mapping[str, Any], Rows]:
        answer, rows = next(self.port.stream_fetch(caller, request))
        assert answer is not None
        return answer, rows

    def rules(self, *lines: str) -> None:
        rules = [Rule.parse(line) for line in lines]
        self.policy.replace([PlacedRule(rule, "test", rule.who.number) for rule in rules])

    def produce(self, count: int = 1, topic: str = "t") -> None:
        self.port.produce(self.alice, topic).produce(block(*[b"x"] * count), None).result(10)

    def close(self) -> None:
        self.port.close()
        self.store.close()


def _no_rules(*_: object) -> None:
    raise AssertionError


@pytest.fixture
def world() -> Iterator[World]:
    made = World(NativeLimits(max_waits=2, max_groups=3, max_members=2, max_fetch_rows=5))
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def me(world) -> dict[str, Any]:
    """The fields that identify a member in a request."""
    joined = world.act("group.join", topic="t", consumer="a")
    assert joined == {"epoch": 1, "heartbeat_ms": 2000, "dead_ms": 5000, "shards": 2}
    return {"topic": "t", "consumer": "a", "epoch": 1}


def held(answer: dict[str, Any]) -> list[dict[str, Any]]:
    ends = {one["shard"]: one["to"] for one in answer["rows"]}
    return [
        {"shard": one["shard"], "epoch": one["epoch"], "next": ends.get(one["shard"], one["low"])}
        for one in answer["assigned"]
    ]


# --- malformed requests

ENTRY = {"shard": 0, "epoch": 1}
MESSAGE = {"topic": "out", "body": encoded(b"x")}
PLACE = {"shard": 0, "shard_epoch": 1, "offset": 0}


@pytest.mark.parametrize(
    ("action", "request_"),
    [
        ("join", {"consumer": ""}),
        ("join", {"consumer": "a" * 129}),
        ("join", {"consumer": "a\nb"}),
        ("join", {"group": ""}),
        ("join", {"group": "\0"}),
        ("join", {"start": "now"}),
        ("join", {"max_deliver": 0}),
        ("join", {"max_deliver": 1 << 40}),
        ("join", {"dead_ms": 10}),
        ("join", {"dead_ms": 1 << 40}),
        ("join", {"heartbeat_ms": 0}),
        ("join", {"heartbeat_ms": 5000}),
        ("join", {"topic": 1}),
        ("heartbeat", {"running": []}),
        ("heartbeat", {"running": {"x": []}}),
        ("heartbeat", {"running": {"0": 1}}),
        ("heartbeat", {"running": {"0": [-1]}}),
        ("ack", {"shards": [{}]}),
        ("ack", {"shards": [{"shard": 0}]}),
        ("ack", {"shards": [{**ENTRY, "wrong": 1}]}),
        ("ack", {"shards": [{**ENTRY, "shard": 7}]}),
        ("ack", {"shards": [{**ENTRY, "acked": [[1, 1]]}]}),
        ("ack", {"shards": [{**ENTRY, "acked": [[2, 1]]}]}),
        ("ack", {"shards": [{**ENTRY, "acked": [[0, 1, 2]]}]}),
        ("ack", {"shards": [{**ENTRY, "acked": [0, 1]}]}),
        ("ack", {"shards": [{**ENTRY, "acked": "all"}]}),
        ("ack", {"shards": [{**ENTRY, "failed": [1]}]}),
        ("ack", {"shards": [{**ENTRY, "failed": [{"reason": "x"}]}]}),
        ("ack", {"shards": [{**ENTRY, "failed": [{"offset": 0, "reason": 1}]}]}),
        ("ack", {"shards": [{**ENTRY, "failed": [{"offset": 0, "attempt": -1}]}]}),
        ("ack", {"shards": [{**ENTRY, "running": [1.5]}]}),
        ("ack", {"shards": [{**ENTRY, "emitted": -1}]}),
        ("ack", {"shards": [{**ENTRY, "release": 1}]}),
        ("commit", {**PLACE, "messages": [{"topic": "out"}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "body": "ä"}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "body": "abc"}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "body": 1}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "headers": {"a": 1}}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "headers": {"a": "?"}}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "shard_key": 1}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "shard_key": "\ud800"}]}),
        ("commit", {**PLACE, "messages": [{**MESSAGE, "insertion_ms": -1}]}),
        ("commit", {**PLACE, "shard": 2}),
        ("commit", {**PLACE, "offset": 99}),
        ("commit", {**PLACE, "stages": "s"}),
        ("leave", {"shards": [{"epoch": 1}]}),
        ("reset", {"to": 1}),
        ("reset", {"to": "now"}),
        ("info", {"group": "a" * 200}),
        ("fetch", {}),  # by a separate call
    ],
)
def test_malformed_requests_change_nothing(world, me, action, request_):
    world.produce(3)
    before = known(world)
    takes = {"join": ("topic", "consumer"), "reset": ("topic",), "info": ("topic",)}
    given = {key: me[key] for key in takes.get(action, me)}
    with pytest.raises(MalformedRequest) as caught:
        world.act(f"group.{action}", **given | request_)
    assert len(str(caught.value)) < 200
    assert known(world) == before


def known(world) -> list[dict[str, Any]]:
    """The shards of a group, without fields that depend on time."""
    shards = world.act("group.info", topic="t")["shards"]
    return [{key: value for key, value in one.items() if key != "lag_s"} for one in shards]


@pytest.mark.parametrize(
    "held_",
    [
        [{}],
        [{"shard": 0, "epoch": 1}],
        [{"shard": 0, "epoch": 1, "next": -1}],
        [{"shard": 0, "epoch": 1, "next": -1, "paused": False, "releasing": False}],
        [{"shard": 0, "epoch": 1, "next": 1 << 63, "paused": False, "releasing": False}],
        [{"shard": 0, "epoch": 1, "next": 0, "paused": 0, "releasing": False}],
        [{"all": 1}],
    ],
)
def test_malformed_held_field_is_refused(world, me, held_):
    with pytest.raises(MalformedRequest):
        world.fetch(**me, held=held_)


def test_oversized_requests_are_refused(world, me):
    many = [{**ENTRY} for _ in range(MAX_ENTRIES + 1)]
    with pytest.raises(LimitReached):
        world.act("group.ack", **me, shards=many)
    with pytest.raises(LimitReached):
        world.act("group.heartbeat", **me, running={"0": list(range(MAX_RUNNING + 1))})
    world.produce(20)
    message = {**MESSAGE, "shard_key": "k" * 1025}
    with pytest.raises(TooLarge):
        world.act("group.commit", **me, **PLACE, messages=[message])


@pytest.mark.parametrize(
    ("limit", "fit", "beyond"),
    [
        ("max_members", {"consumer": "b"}, {"consumer": "c"}),
        ("max_groups", {"consumer": "a", "group": "2"}, {"consumer": "a", "group": "4"}),
    ],
)
def test_members_and_groups_are_limited(world, me, limit, fit, beyond):
    world.act("group.join", topic="t", **fit)
    world.act("group.join", topic="t", **fit)
    world.act("group.join", topic="t", consumer="a", group="3")
    with pytest.raises(LimitReached) as caught:
        world.act("group.join", topic="t", **beyond)
    assert caught.value.limit == limit


def test_groups_count_against_their_creator(world):
    world.port.shares.groups.share = 1
    world.act("group.join", topic="t", consumer="a", group="1")
    with pytest.raises(LimitReached) as caught:
        world.act("group.join", topic="t", consumer="a", group="2")
    assert caught.value.limit == "max_user_groups"
    world.port.act(world.bob, "group.join", {"topic": "t", "consumer": "b", "group": "2"})
    world.port.act(world.bob, "group.join", {"topic": "t", "consumer": "b", "group": "1"})
    world.act("group.rm", topic="t", group="1", force=True)
    world.act("group.join", topic="t", consumer="a", group="3")


def test_missing_topics_and_groups_are_refused(world, me):
    for action, request in (
        ("join", {"topic": "none", "consumer": "a"}),
        ("info", {"topic": "t", "group": "none"}),
        ("rm", {"topic": "t", "group": "none"}),
        ("reset", {"topic": "t", "group": "none", "to": "latest"}),
    ):
        with pytest.raises(DoesNotExist):
            world.act(f"group.{action}", **request)
    with pytest.raises(Expired):
        world.act("group.heartbeat", **{**me, "group": "none"})
    with pytest.raises(Expired):
        world.act("group.heartbeat", **{**me, "consumer": "none"})
    with pytest.raises(Expired):
        world.act("group.heartbeat", **{**me, "epoch": 9})


# --- effects


def test_member_lifecycle(world, me):
    world.produce(4)
    answer, rows = world.fetch(**me)
    assert rows.count == sum(one["to"] - one["from"] for one in answer["rows"])
    (place,) = answer["rows"]
    shard, epoch = place["shard"], place["epoch"]
    entry = {"shard": shard, "epoch": epoch, "acked": [[0, 2]], "emitted": 3, "running": [2]}
    response = world.act("group.ack", **me, shards=[entry])
    assert response["shards"] == [
        {"shard": shard, "low": 2, "attempts": {}, "dead": [], "error": None}
    ]
    at = {"shard": shard, "shard_epoch": epoch, "offset": 2}
    done = world.act("group.commit", **me, **at, messages=[MESSAGE, {**MESSAGE, "topic": "t"}])
    assert not done["duplicate"]
    assert [(one["topic"], one["count"]) for one in done["spans"]] == [("t", 1), ("out", 1)]
    assert world.act("group.commit", **me, **at, messages=[MESSAGE])["duplicate"]
    beat = world.act("group.heartbeat", **me, running={str(shard): [3]})
    assert beat == {"release": [], "assigned": [0, 1]}
    (listed,) = world.act("group.list")["groups"]
    assert (listed["topic"], listed["group"], listed["members"]) == ("t", "default", 1)
    assert (listed["acked"], listed["lag"]) == (3, 2)
    assert world.act("group.list", topic="x*")["groups"] == []
    assert world.act("group.leave", **me) == {"shards": []}
    moved = world.act("group.reset", topic="t", to={"offsets": {str(shard): 1}})
    assert moved == {"offsets": {str(shard): 1}}
    assert world.act("group.rm", topic="t") == {}
    assert world.act("group.list")["groups"] == []


def test_fetch_is_limited_by_the_bus(world, me):
    world.produce(20)
    _, rows = world.fetch(**me, max_rows=1000)
    assert rows.count == 5


def test_traffic_is_counted(world, me):
    world.produce(3)
    before = world.port.access.durable.traffic.totals
    world.fetch(**me)
    (shard,) = [n for n, one in enumerate(world.act("bounds", topic="t")["shards"]) if one["end"]]
    place = {**PLACE, "shard": shard}
    world.act("group.commit", **me, **place, messages=[MESSAGE])
    world.act("group.commit", **me, **place, messages=[MESSAGE])
    after = world.port.access.durable.traffic.totals
    assert after != before


# --- rights


def test_group_actions_need_the_subscribe_right(world, me):
    world.produce(1)
    world.rules("deny user:4343 subscribe t")
    asked = {
        "join": {"topic": "t", "consumer": "b"},
        "heartbeat": me,
        "ack": {**me, "shards": []},
        "commit": {**me, **PLACE},
        "leave": me,
        "reset": {"topic": "t", "to": "latest"},
        "info": {"topic": "t"},
        "rm": {"topic": "t"},
    }
    for action, request in asked.items():
        with pytest.raises(Denied):
            world.port.act(world.bob, f"group.{action}", request)
    with pytest.raises(Denied):
        world.fetch_as(world.bob, **me)
    assert world.port.act(world.bob, "group.list", {})["groups"] == []
    assert len(world.act("group.list")["groups"]) == 1


def test_revoked_right_is_refused_at_the_next_call(world, me):
    world.act("group.heartbeat", **me)
    world.rules("deny user:4242 subscribe t")
    with pytest.raises(Denied):
        world.act("group.heartbeat", **me)
    world.rules()
    world.act("group.heartbeat", **me)


def test_transaction_outputs_need_the_produce_right(world, me):
    world.produce(1)
    (shard,) = [n for n, one in enumerate(world.act("bounds", topic="t")["shards"]) if one["end"]]
    world.rules("deny user:4242 produce secret")
    messages = [MESSAGE, {**MESSAGE, "topic": "secret"}]
    with pytest.raises(Denied):
        world.act("group.commit", **me, **{**PLACE, "shard": shard}, messages=messages)
    assert world.act("group.info", topic="t")["shards"][shard]["acked"] == 0


def test_dead_letter_needs_no_right_of_the_consumer(world):
    world.act("group.join", topic="t", consumer="a", max_deliver=1)
    me = {"topic": "t", "consumer": "a", "epoch": 1}
    world.produce(1)
    world.rules("deny user:4343 produce t.dlq", "deny user:4343 create *")
    (place,) = world.fetch_as(world.bob, **me)[0]["rows"]
    entry = {"shard": place["shard"], "epoch": 1, "failed": [{"offset": 0, "reason": "x"}]}
    (response,) = world.port.act(world.bob, "group.ack", {**me, "shards": [entry]})["shards"]
    assert response["dead"] == [0]
    assert world.act("topic.info", topic="t.dlq")["creator"] == "uid:4242"
    assert world.act("topic.info", topic="t.dlq")["shards"] == 2


def fail_one(world: World) -> list[int]:
    """Let alice's only run of a message fail. Returns the offsets of new dead letters."""
    joined = world.act("group.join", topic="t", consumer="a", max_deliver=1)
    me = {"topic": "t", "consumer": "a", "epoch": joined["epoch"]}
    answer, _ = world.fetch(**me)
    (place,) = answer["rows"]
    epochs = {one["shard"]: one["epoch"] for one in answer["assigned"]}
    shard = place["shard"]
    failed = [{"offset": place["from"], "reason": "x"}]
    entry = {"shard": shard, "epoch": epochs[shard], "failed": failed}
    (response,) = world.act("group.ack", **me, shards=[entry])["shards"]
    assert response["error"] is None
    return list(response["dead"])


@pytest.mark.parametrize("creator", ["alice", "bob", "root"])
def test_dead_letters_go_to_topics_of_the_same_user_or_an_admin(world, creator):
    world.act("topic.drop", topic="t")
    root = world.port.new_caller(ROOT, lambda: False)
    callers = {"alice": world.alice, "bob": world.bob, "root": root}
    world.port.act(callers[creator], "topic.create", {"topic": "t.dlq", "shards": 1})
    world.act("topic.create", topic="t", shards=2)
    world.produce(1)
    assert fail_one(world) == ([] if creator == "bob" else [0])
    assert world.alarms.is_raised("dead_letters_blocked", "t") is (creator == "bob")
    if creator != "bob":
        return
    shards = world.act("group.info", topic="t")["shards"]
    assert [shard["acked"] for shard in shards] == [0, 0]
    (alarm,) = world.alarms.to_json(with_names=True)
    assert alarm["text"] == (
        "dead letters of t cannot be written to t.dlq: t.dlq belongs to uid:4343 and t to"
        " uid:4242; remove t.dlq, and the bus creates it again"
    )
    world.port.act(world.bob, "topic.drop", {"topic": "t.dlq"})
    until(lambda: not world.alarms.is_raised("dead_letters_blocked", "t"), "the alarm is cleared")
    assert world.act("topic.info", topic="t.dlq")["creator"] == "uid:4242"
    assert fail_one(world) == [0]


def test_dead_letter_topic_created_by_a_reader_belongs_to_the_topics_creator(world):
    world.port.act(world.bob, "topic.create", {"topic": "t.dlq", "shards": 1})
    assert world.act("topic.info", topic="t.dlq")["creator"] == "uid:4242"
    with pytest.raises(Denied):
        world.port.act(world.bob, "topic.drop", {"topic": "t.dlq"})
    world.produce(1)
    assert fail_one(world) == [0]


def test_rules_do_not_keep_the_bus_from_creating_dead_letters(world):
    world.rules("deny everyone create *")
    world.produce(1)
    assert fail_one(world) == [0]


def test_client_cannot_forge_dead_letters(world):
    world.produce(1)
    with pytest.raises(Denied):
        world.port.produce(world.alice, "t.dlq")
    joined = world.act("group.join", topic="t", consumer="a")
    (shard,) = [n for n, one in enumerate(world.act("bounds", topic="t")["shards"]) if one["end"]]
    with pytest.raises(Denied):
        world.act(
            "group.commit",
            topic="t",
            consumer="a",
            epoch=joined["epoch"],
            **{**PLACE, "shard": shard},
            messages=[{**MESSAGE, "topic": "t.dlq"}],
        )


def test_topic_of_a_group_leaves_room_for_the_name_of_its_dead_letters(world):
    longest = "t" * (MAX_NAME_BYTES - len(".dlq"))
    for name in (longest, longest + "t"):
        world.act("topic.create", topic=name)
    world.act("group.join", topic=longest, consumer="a")
    with pytest.raises(InvalidTopic, match="must leave room"):
        world.act("group.join", topic=longest + "t", consumer="a")


# --- waiting


def begin(world, pool, **request) -> Future[Any]:
    count = world.port.waits.count
    future = pool.submit(world.fetch, wait_ms=LONG_MS, **request)
    until(lambda: world.port.waits.count > count or future.done(), "it waits")
    assert not future.done()
    return future


@pytest.fixture
def waiting(world, pool, me):
    """A member that has all rows and waits for more."""
    answer, _ = world.fetch(**me)
    return begin(world, pool, **me, held=held(answer))


def test_new_messages_end_a_waiting_fetch(world, waiting):
    world.produce(2)
    answer, rows = waiting.result(10)
    assert rows.count == 2
    assert answer["assigned"] == answer["lost"] == answer["release"] == []
    assert world.port.waits.count == 0


def test_another_member_ends_a_waiting_fetch(world, waiting):
    world.act("group.join", topic="t", consumer="b")
    assert waiting.result(10)[0]["release"] == [1]


def test_assignment_of_a_shard_ends_a_waiting_fetch(world, pool, me):
    joined = world.act("group.join", topic="t", consumer="b")
    other = begin(world, pool, topic="t", consumer="b", epoch=joined["epoch"])
    world.act("group.leave", **me)
    assert [one["shard"] for one in other.result(10)[0]["assigned"]] == [0, 1]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("leave", Expired),
        ("join", Fenced),
        ("rm", Expired),
        ("drop", DoesNotExist),
    ],
)
def test_expired_member_does_not_wait(world, me, waiting, end, error):
    if end == "leave":
        world.act("group.leave", **me)
    elif end == "join":
        world.act("group.join", topic="t", consumer="a")
    elif end == "rm":
        world.act("group.rm", topic="t", force=True)
    else:
        world.act("topic.drop", topic="t")
    with pytest.raises((error, Expired)):
        waiting.result(10)


def test_revoked_right_ends_a_waiting_fetch(world, waiting):
    world.rules("deny user:9 subscribe t")  # of another user: the wait continues
    assert not waiting.done()
    world.rules("deny user:4242 subscribe t")
    with pytest.raises(Denied):
        waiting.result(20)


def test_disconnected_client_does_not_wait(world, waiting):
    world.gone = True
    world.port.waits.check_callers()
    assert waiting.result(10)[1].count == 0


def test_stopping_bus_ends_waiting_fetches(world, waiting):
    world.port.close()
    assert waiting.result(10)[1].count == 0


def test_waiting_fetches_are_limited(world, pool, me, waiting):
    answer, _ = world.fetch(**me)
    second = begin(world, pool, **me, held=held(answer))
    with pytest.raises(LimitReached) as caught:
        world.fetch(**me, held=held(answer), wait_ms=LONG_MS)
    assert caught.value.limit == "max_waits"
    assert (
        world.fetch(**me, held=held(answer))[1].count == 0
    )  # a fetch that does not wait needs no slot
    world.produce(1)
    waiting.result(10)
    second.result(10)


# --- following


@pytest.fixture
def following(world, me) -> Iterator[FetchPart]:
    """A member that knows its shards and follows for five rows."""
    answer, _ = world.fetch(**me)
    asked = {**me, "held": held(answer), "wait_ms": LONG_MS, "follow": True}
    return world.port.stream_fetch(world.alice, asked)


def test_following_fetch_streams_rows_until_its_limit(world, following):
    world.produce(2)
    answer, rows = next(following)
    assert (answer, rows.count) == (None, 2)
    world.produce(2)
    first = memoryview(rows.ids).cast("B").cast("q")[0]
    answer, rows = next(following)
    assert (answer, memoryview(rows.ids).cast("B").cast("q").tolist()) == (
        None,
        [first + 2, first + 3],
    )
    world.produce(7)
    assert next(following)[1].count == 1
    assert next(following, None) is None
    assert world.port.waits.count == 0


def test_following_fetch_waits_for_rows(world, pool, following):
    world.produce(1)
    assert next(following)[1].count == 1
    later = pool.submit(next, following)
    until(lambda: world.port.waits.count == 1, "it waits")
    world.produce(1)
    assert later.result(10)[1].count == 1


def test_assignment_change_ends_a_following_fetch(world, following):
    world.produce(1)
    assert next(following)[0] is None
    world.act("group.join", topic="t", consumer="b")
    answer, _ = next(following)
    assert answer["release"] == [1]
    assert next(following, None) is None


def test_following_fetch_ends_on_timeout_and_revoked_right(world, me):
    answer, _ = world.fetch(**me)
    asked = {**me, "held": held(answer), "wait_ms": 1, "follow": True}
    ((answer, rows),) = world.port.stream_fetch(world.alice, asked)
    assert (answer["rows"], rows.count) == ([], 0)
    world.produce(1)
    following = world.port.stream_fetch(world.alice, {**asked, "wait_ms": LONG_MS})
    assert next(following)[1].count == 1
    world.rules("deny user:4242 subscribe t")
    world.produce(1)
    with pytest.raises(Denied):
        next(following)


# --- pauses


@pytest.mark.parametrize("action", ["topic.pause", "topic.resume", "group.pause", "group.resume"])
def test_only_the_creator_and_admins_pause(world, me, action):
    request = {"topic": "t"} | ({"group": "default"} if action.startswith("group") else {})
    with pytest.raises(Denied):
        world.port.act(world.bob, action, request)
    world.port.act(world.port.new_caller(ROOT, lambda: False), action, request)
    world.act(action, **request)


@pytest.mark.parametrize("noun", ["topic", "group"])
def test_end_of_a_pause_wakes_a_waiting_fetch(world, me, pool, noun):
    answer, _ = world.fetch(**me)
    request = {"topic": "t"} | ({"group": "default"} if noun == "group" else {})
    world.act(f"{noun}.pause", **request, **({"consume": True} if noun == "topic" else {}))
    world.produce(3)
    waiting = pool.submit(world.fetch, **me, held=held(answer), wait_ms=LONG_MS)
    until(lambda: world.port.waits.count == 1, "the fetch waits")
    world.produce(1)
    assert not waiting.done()
    world.act(f"{noun}.resume", **request)
    assert waiting.result(20)[1].count == 4


def test_pause_of_one_side_leaves_the_other(world):
    assert world.act("topic.pause", topic="t")["paused"] == ["consume", "produce"]
    assert world.act("topic.resume", topic="t", produce=True)["paused"] == ["consume"]
    world.produce(1)
    assert world.act("topic.pause", topic="t", produce=True)["paused"] == ["consume", "produce"]
    changed = world.act("topic.configure", topic="t", settings={"max_bytes": 10})
    assert (changed["paused"], changed["settings"]["max_bytes"]) == (["consume", "produce"], 10)
    assert world.act("topic.resume", topic="t")["paused"] == []


def test_transaction_with_an_output_to_a_paused_topic_changes_nothing(world, me):
    world.produce(1)
    answer, _ = world.fetch(**me)
    world.act("topic.create", topic="out", shards=1)
    world.act("topic.pause", topic="out", produce=True)
    (shard,) = [one for one in answer["assigned"] if one["shard"] == answer["rows"][0]["shard"]]
    place = {"shard": shard["shard"], "shard_epoch": shard["epoch"], "offset": 0}
    with pytest.raises(Paused):
        world.act("group.commit", **me, **place, messages=[MESSAGE])
    assert world.act("group.info", topic="t")["shards"][shard["shard"]]["acked"] == 0
    world.act("topic.resume", topic="out")
    assert not world.act("group.commit", **me, **place, messages=[MESSAGE])["duplicate"]
