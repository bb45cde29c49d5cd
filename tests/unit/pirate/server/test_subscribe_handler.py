"""SUB and UNSUB: start positions, and topics that exist as long as their subscribers."""

from __future__ import annotations

from concurrent.futures import Future

from polybus.bus.rule_table import PlacedRule
from polybus.dialects.pirate.codec import GET, PUT, SUB, UNSUB, ClientRequest
from polybus.dialects.pirate.server import subscriber_records
from polybus.durable.topic_names import CREATOR
from polybus.errors import (
    Denied,
    DoesNotExist,
    LimitReached,
    StoreFull,
    Unavailable,
    WrongKind,
)
from polybus.groups import group_records as groups
from polybus.model.access_rule import Rule
from polybus.model.commit import Commit, RecordChange
from polybus.model.identity import IN_DOUBT, Identity
from tests.unit.pirate.server.memory_subscribers import MemorySubscribers


def stored(world: MemorySubscribers, family: bytes) -> int:
    return len(world.store.scan(family))


def test_first_sub_creates_a_topic_with_keep_read(world):
    caller = Identity(uid=1000)
    assert world.client().sub("t", caller) == 0
    topic = world.durable.get("t")
    assert topic.generations == (1,)
    assert topic.settings["keep"] == "read"
    assert topic.settings[CREATOR]["uid"] == 1000


def test_sub_starts_at_the_newest_id_and_a_second_sub_does_not_move_it(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    first.put("t")
    first.put("t")
    assert second.sub("t") == 2
    first.put("t")
    assert second.sub("t") == 2
    assert second.get("t", 3) is None
    assert second.sub("t") == 3


def test_repeated_sub_after_a_lost_answer_gets_it_again(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    first.put("t")
    first.put("t")
    sub = ClientRequest(SUB, b"b", 1, 1, "t")
    assert world.ask(sub) == 2
    first.put("t")
    first.put("t")
    assert world.ask(sub) == 2
    assert second.get("t").id == 3


def test_unsub_returns_whether_it_was_subscribed(world):
    client = world.client()
    assert client.unsub("t") == 0
    client.sub("t")
    assert client.unsub("t") == 1
    assert client.unsub("t") == 0
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 0
    )


def test_topic_is_removed_with_its_last_subscriber_and_ids_continue(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    second.sub("t")
    first.put("t")
    first.unsub("t")
    assert world.durable.find("t") is not None
    second.unsub("t")
    assert world.durable.find("t") is None
    assert isinstance(first.put("t"), DoesNotExist)
    assert second.sub("t") == 1
    assert first.put("t") == 2
    assert second.get("t").id == 2


def test_sub_during_removal_gets_a_new_topic(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    number = world.durable.get("t").number
    left = world.send(ClientRequest(b"UNSUB", b"a", 1, first.next(), "t"))
    reply = world.send(ClientRequest(SUB, b"b", 1, second.next(), "t"))
    world.settle()
    assert (left, reply) == ([1], [0])
    assert second.put("t") == 1
    # In either order: the topic exists and has a subscriber.
    assert world.durable.get("t").number >= number
    assert [one.key.client for one in world.subscriptions()] == [b"b"]


def test_topic_read_by_a_group_is_removed_after_the_group(world):
    client = world.client()
    client.sub("t")
    topic = world.durable.get("t")
    roster = groups.roster_key(topic.number, "g")
    world.store.commit(Commit(changes=(RecordChange(roster, b"{}"),))).result(20)
    client.unsub("t")
    assert world.durable.find("t") is topic
    assert client.put("t") == 1
    world.store.commit(Commit(changes=(RecordChange(roster, None),))).result(20)
    world.again()  # a start looks for them
    assert [one.name for one in world.store.topics()] in ([], ["t"])
    later = world.again()
    later.collect()
    assert world.store.topics() == []


def test_topic_of_another_creator_is_not_removed(world):
    world.store.create("t", 2, {"keep": "read"})
    world = world.again()
    client = world.client()
    assert client.sub("t") == 0
    assert client.unsub("t") == 1
    assert world.durable.find("t") is not None


def test_subscriptions_survive_a_restart(world):
    client = world.client()
    client.sub("t")
    client.put("t")
    client.put("t")
    assert client.get("t", 1).id == 2
    again = world.again()
    (found,) = again.subscriptions()
    assert (found.key.client, found.last, found.saved) == (b"c", 1, 1)


def test_topic_created_without_a_subscription_is_removed_at_start(world):
    world.store.create("t", 1, {"keep": "read", "with_subscribers": True})
    again = world.again()
    again.collect()
    assert again.durable.find("t") is None


def test_dropped_topic_removes_subscriptions_and_records(world):
    client = world.client()
    client.sub("t")
    topic = world.durable.get("t")
    world.store.drop("t")
    world.binding.remove(topic)
    world.settle()
    assert isinstance(client.get("t"), DoesNotExist)
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 0
    )
    assert client.sub("t") == 0


def test_records_of_a_topic_dropped_while_stopped_are_removed(world):
    world.client().sub("t")
    world.store.drop("t")
    again = world.again()
    assert again.subscriptions() == []
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 0
    )


def test_ephemeral_topic_is_denied_and_the_denial_stored(world):
    client = world.client()
    world.ephemeral.add(b"t")
    assert isinstance(client.sub("t"), WrongKind)
    put = ClientRequest(PUT, b"c", 1, 9, "t", (b"x",))
    assert isinstance(world.ask(put), WrongKind)
    world.ephemeral.clear()
    assert isinstance(world.ask(put), WrongKind)
    assert client.unsub("t").__class__.__name__ == "Stale"  # its counter is less than 9


def test_policy_denials_are_stored(world):
    eve, bob = Identity(uid=1), Identity(uid=2)
    client = world.client()
    client.sub("t", bob)
    rule = Rule.parse(f"deny user:{eve.uid} produce,subscribe *")
    world.policy.replace([PlacedRule(rule, "test", eve.uid)])
    assert isinstance(client.put("t", caller=eve), Denied)
    assert isinstance(client.sub("u", eve), Denied)
    assert isinstance(client.get("t", caller=eve), Denied)
    assert client.put("t", caller=bob) == 1


def test_subscriptions_are_bounded_per_bus_and_user():
    world = MemorySubscribers(max_subscriptions=2, max_user_subscriptions=1)
    one, two = Identity(uid=1), Identity(uid=2)
    client = world.client()
    assert client.sub("a", one) == 0
    refused = client.sub("b", one)
    assert isinstance(refused, LimitReached)
    assert refused.limit == "max_user_subscriptions"
    assert client.sub("b", two) == 0
    refused = client.sub("c", Identity(uid=3))
    assert isinstance(refused, LimitReached)
    assert refused.limit == "max_subscriptions"
    client.unsub("a")
    client.counter += 1
    assert client.sub("c", one) == 0


def test_failed_commit_uses_no_counter(world, monkeypatch):
    client = world.client()
    client.sub("t")
    kept = world.store.commit

    def full(commit: Commit):
        if commit.stamp is None:
            return kept(commit)
        failed: Future[object] = Future()
        failed.set_exception(StoreFull("no room"))
        return failed

    monkeypatch.setattr(world.store, "commit", full)
    monkeypatch.setattr(world.store, "commit_all", lambda all_: [full(one) for one in all_])
    assert isinstance(client.sub("u"), StoreFull)
    assert isinstance(client.unsub("t"), StoreFull)
    assert isinstance(client.put("t"), StoreFull)
    monkeypatch.undo()
    client.counter -= 3
    assert client.unsub("t") == 1
    assert [one.key.client for one in world.subscriptions()] == []


def test_subscription_can_be_dropped_by_an_admin(world):
    client = world.client()
    client.sub("t")
    client.sub("u")
    results: list[object] = []
    gone = [one for one in world.subscriptions() if one.key.topic == 1]
    world.bus.drop(gone, results.append)
    world.settle()
    assert results == [[]]
    assert len(world.subscriptions()) == 1
    assert world.durable.find("t") is None


def test_all_subscriptions_of_a_client_can_be_dropped_at_once():
    world = MemorySubscribers(max_client_requests=2)
    client = world.client()
    for number in range(5):
        client.sub(f"t{number}")
    results: list[object] = []
    world.bus.drop(world.subscriptions(), results.append)
    world.settle()
    assert results == [[]]
    assert world.subscriptions() == []
    assert world.durable.topics() == []


def test_requests_wait_while_their_subscription_is_dropped(world):
    """Else LAST of a removed subscription would be stored."""
    client = world.client()
    client.sub("t")
    client.put("t")
    results: list[object] = []
    world.bus.drop(world.subscriptions(), results.append)
    reply = world.send(ClientRequest(GET, b"c", client.epoch, 0, "t", (), 1))
    again = world.send(ClientRequest(SUB, b"c", client.epoch, client.next(), "t"))
    world.bus.on_turn_end()
    world.settle()
    assert results == [[]]
    assert isinstance(reply[0], DoesNotExist)
    assert again == [1]
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 1
    )


def test_drop_does_not_affect_a_newer_subscription(world):
    world.client(b"keeper").sub("t")  # else the topic would go, too
    client = world.client()
    client.sub("t")
    gone = [one for one in world.subscriptions() if one.key.client == b"c"]
    world.send(ClientRequest(UNSUB, b"c", client.epoch, client.next(), "t"))
    world.send(ClientRequest(SUB, b"c", client.epoch, client.next(), "t"))
    results: list[object] = []
    world.bus.drop(gone, results.append)
    world.settle()
    assert results == [[]]
    assert client.get("t") is None
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 2
    )


def test_copy_of_a_sub_after_its_drop_does_not_subscribe(world):
    """It gets its first answer again and has no effect."""
    world.client(b"keeper").sub("t")
    client = world.client()
    assert client.sub("t") == 0
    world.bus.drop([one for one in world.subscriptions() if one.key.client == b"c"], print)
    world.settle()
    assert world.ask(ClientRequest(SUB, b"c", client.epoch, client.counter, "t")) == 0
    assert [one.key.client for one in world.subscriptions()] == [b"keeper"]
    assert isinstance(client.get("t"), DoesNotExist)


def test_idle_subscription_is_dropped_and_counted():
    world = MemorySubscribers(subscriber_ttl_s=60.0)
    idle, busy = world.client(b"idle"), world.client(b"busy")
    idle.sub("t")
    busy.sub("t")
    world.now_s += 50
    busy.get("t")
    world.now_s += 20
    world.collect()
    assert [one.key.client for one in world.subscriptions()] == [b"busy"]
    assert world.counters.get("dropped", "subscriber_ttl_s") == 1
    assert isinstance(idle.get("t"), DoesNotExist)


def test_denial_of_a_caller_in_doubt_is_not_stored(world):
    """The client may repeat the request on a connection whose user is known."""
    alice = Identity(7)
    client = world.client()
    client.sub("t", alice)
    rule = Rule.parse("deny user:8 produce,subscribe,create *")
    world.policy.replace([PlacedRule(rule, "test", 8)])
    put = ClientRequest(PUT, client.name, client.epoch, client.next(), "t", (b"x",))
    assert isinstance(world.ask(put, IN_DOUBT), Unavailable)
    assert world.ask(put, alice) == 1
    sub = ClientRequest(SUB, client.name, client.epoch, client.next(), "u")
    assert isinstance(world.ask(sub, IN_DOUBT), Unavailable)
    assert world.ask(sub, alice) == 0
    get = ClientRequest(GET, client.name, client.epoch, 0, "t")
    assert isinstance(world.ask(get, IN_DOUBT), Unavailable)
    assert world.ask(get, alice).id == 1


def test_subscription_of_a_caller_in_doubt_counts_as_anonymous(world):
    world.client().sub("t", IN_DOUBT)
    assert [one.account for one in world.subscriptions()] == ["anonymous"]
