"""Assignment is even and sticky, and each shard has one owner, in any order of events."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polybus.groups.assignment import assign_shards
from polybus.store.engine_registry import open_store
from tests.unit.groups.group_harness import GroupHarness, HarnessMember

MEMBERS = st.sets(st.sampled_from("abcdefgh"))
OWNERS = st.lists(st.none() | st.sampled_from("abcdefgh"), max_size=40)


def counts(target: dict[int, str], members: set[str]) -> list[int]:
    owned = list(target.values())
    return sorted(owned.count(name) for name in members)


@given(MEMBERS, OWNERS, OWNERS)
def test_assignment_is_even_and_complete(members, before, holders):
    shards = dict(enumerate(before))
    target = assign_shards(members, shards, dict(enumerate(holders)))
    if not members:
        assert target == {}
        return
    assert target.keys() == shards.keys()
    assert set(target.values()) <= members
    sizes = counts(target, members)
    assert sizes[-1] - sizes[0] <= 1


@given(MEMBERS.filter(bool), OWNERS)
def test_shards_move_only_if_necessary(members, before):
    """Return the minimum number of moves over all choices of the members with one more."""
    shards = dict(enumerate(before))
    target = assign_shards(members, shards, shards)
    stayed = sum(1 for shard, owner in shards.items() if target[shard] == owner)
    least, over = divmod(len(shards), len(members))
    held = sorted((before.count(name) for name in members), reverse=True)
    could_stay = sum(min(n, least + (place < over)) for place, n in enumerate(held))
    assert stayed == could_stay


@given(MEMBERS.filter(bool), OWNERS)
def test_even_assignment_is_unchanged(members, before):
    target = assign_shards(members, dict(enumerate(before)), {})
    assert assign_shards(members, target, {}) == target
    assert assign_shards(members, target, dict(enumerate(before))) == target


def test_shard_stays_with_its_holder_if_even():
    # b was assigned shard 2 of c and 3 of a, and died before it got them.
    before = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    holders = {**before, 2: "c", 3: "a"}
    target = assign_shards({"a", "c"}, before, holders)
    assert target == {0: "a", 1: "a", 2: "c", 3: "a", 4: "c", 5: "c"}


class Hands(RuleBasedStateMachine):
    """Members join, leave, drain and die in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.store = open_store("memory:")
        self.harness = GroupHarness(self.store)
        self.harness.topic(shards=7)
        self.seats: dict[str, HarnessMember] = {}
        self.owners: dict[tuple[int, int], str] = {}  # (shard, epoch) → owner

    def teardown(self) -> None:
        self.store.close()

    @rule(name=st.sampled_from("abcde"))
    def join(self, name):
        self.seats[name] = self.harness.join(name)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def leave(self, data):
        self.seats.pop(self.pick(data)).leave()

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def die(self, data):
        del self.seats[self.pick(data)]
        for _ in range(2):
            self.harness.now += 3
            for member in self.seats.values():
                member.beat()
            self.harness.groups.tick()

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def release_one(self, data):
        member = self.seats[self.pick(data)]
        for number in member.fetch().release[:1]:
            assert member.ack(number, release=True)["error"] is None

    @rule()
    def restart(self):
        self.harness.open()
        self.harness.groups.tick()

    def pick(self, data) -> str:
        return data.draw(st.sampled_from(sorted(self.seats)))

    @invariant()
    def each_shard_has_one_owner_that_is_there(self):
        if not self.harness.groups.names(self.harness.topic()):
            return
        for shard in self.harness.info()["shards"]:
            owner, key = shard["owner"], (shard["shard"], shard["epoch"])
            assert (owner is None) == (not self.seats)
            assert owner is None or owner in self.seats
            assert owner is None or self.owners.setdefault(key, owner) == owner

    @invariant()
    def once_all_is_released_it_is_even(self):
        if not self.seats:
            return
        sizes = sorted(len(member.owns) for member in self.seats.values())
        draining = any(member.beat()[0] for member in self.seats.values())
        assert draining or sizes[-1] - sizes[0] <= 1


TestHands = Hands.TestCase
TestHands.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
