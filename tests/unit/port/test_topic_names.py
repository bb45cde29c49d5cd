"""Names of durable topics: creation, rights and quotas, on the reference engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.bus.counters import Counters
from polybus.bus.policy import Policy
from polybus.bus.quotas import Quotas
from polybus.durable.topic_names import NameReservation, TopicNames, creator_of
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import (
    Denied,
    DoesNotExist,
    InvalidTopic,
    LimitReached,
    StoreFull,
    Unavailable,
    WrongKind,
)
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.limits import QuotaLimits
from polybus.native.port.topic_access import TopicAccess
from polybus.store.engine_registry import open_store

ALICE, BOB, ROOT = Identity(uid=4242), Identity(uid=4343), Identity(uid=0)


class Silent:
    def warning(self, *_args: object, **_fields: object) -> None:
        pass

    debug = info = warning


class World:
    def __init__(self, quota_topics: int = 2) -> None:
        self.store = open_store("memory:")
        self.durable = DurableTopics(self.store)
        self.policy = Policy()
        quotas = Quotas(QuotaLimits(quota_topics=quota_topics), Counters(), Silent())
        self.ephemeral: set[bytes] = set()
        self.binding = TopicNames(self.durable, self.policy, quotas, self.ephemeral.__contains__)
        self.access = TopicAccess(
            self.durable, self.binding, self.policy, lambda fn, *args: fn(*args)
        )


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.store.close()


def test_name_is_reserved_created_and_found(world):
    found, mine = world.binding.reserve(ALICE, "t")
    assert isinstance(found, NameReservation)
    assert mine
    assert world.binding.is_durable(b"t")
    assert world.binding.reserve(BOB, "t") == (found, False)
    calls = []
    world.binding.on_bound.append(calls.append)
    topic = world.store.create("t", 1, {})
    world.binding.complete(found, topic, 1)
    assert found.outcome.result(0) == topic
    assert calls == [topic]
    assert world.binding.reserve(BOB, "t") == (topic, False)


def test_failed_creation_frees_the_name(world, monkeypatch):
    def full(*_args: object) -> None:
        raise StoreFull("no room")

    monkeypatch.setattr(world.store, "create", full)
    for _ in range(3):  # the quota of two is given back each time
        with pytest.raises(StoreFull):
            world.access.find_or_create(ALICE, "t", 1, {})
    assert not world.binding.is_durable(b"t")


def test_creator_survives_configure(world):
    topic, new = world.access.find_or_create(ALICE, "t", 2, {"max_bytes": 5})
    assert new
    assert creator_of(topic) == world.binding.creator_of(b"t") == ALICE
    assert world.access.find_or_create(BOB, "t", 1, {}) == (topic, False)
    changed = world.access.configure(ALICE, "t", {})
    assert creator_of(changed) == ALICE
    assert "max_bytes" not in changed.settings
    assert world.durable.get("t") == changed


def test_only_the_creator_and_admins_change_and_drop(world):
    world.access.find_or_create(ALICE, "t", 1, {})
    for stranger in (BOB, ANONYMOUS, Identity(key="ops")):
        with pytest.raises(Denied):
            world.access.drop(stranger, "t")
        with pytest.raises(Denied):
            world.access.configure(stranger, "t", {})
    world.access.drop(ALICE, "t")
    with pytest.raises(DoesNotExist):
        world.durable.get("t")
    world.access.find_or_create(BOB, "t", 1, {})
    world.access.drop(ROOT, "t")
    assert world.store.topics() == []


def test_topic_is_changed_by_one_caller_at_a_time(world):
    world.access.find_or_create(ALICE, "t", 1, {})
    topic = world.binding.claim(ALICE, "t")
    with pytest.raises(Unavailable):
        world.access.drop(ALICE, "t")
    world.binding.release(topic)
    world.access.drop(ALICE, "t")


def test_failed_change_ends_the_claim(world, monkeypatch):
    world.access.find_or_create(ALICE, "t", 1, {})
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "drop", lambda name: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            world.access.drop(ALICE, "t")
    world.access.drop(ALICE, "t")


def test_quotas_names_and_kinds_are_checked(world):
    for name in ("a", "b"):
        world.access.find_or_create(ALICE, name, 1, {})
    with pytest.raises(LimitReached):
        world.access.find_or_create(ALICE, "c", 1, {})
    world.access.drop(ALICE, "a")
    world.access.find_or_create(ALICE, "c", 1, {})
    with pytest.raises(InvalidTopic):
        world.access.find_or_create(BOB, "_x", 1, {})
    world.ephemeral.add(b"e")
    with pytest.raises(WrongKind):
        world.access.find_or_create(BOB, "e", 1, {})


def test_listeners_are_called_for_dropped_topics(world):
    topic, _ = world.access.find_or_create(ALICE, "t", 1, {})
    calls = []
    world.access.add_drop_listener(calls.append)
    world.access.drop(ALICE, "t")
    assert calls == [topic]


def test_rule_change_increments_the_generation(world):
    before = world.access.generation
    world.policy.replace(())
    assert world.access.generation == before + 1
