"""SUB and UNSUB: where a subscriber begins, and topics that live as long as it does."""

from __future__ import annotations

from concurrent.futures import Future

from polybus.bus.rule_table import PlacedRule
from polybus.dialects.pirate.codec import GET, PUT, SUB, UNSUB, Request
from polybus.dialects.pirate.server import subscriber_records
from polybus.durable.topic_names import CREATOR
from polybus.errors import Denied, DoesNotExist, LimitReached, StoreFull, WrongKind
from polybus.groups import group_records as groups
from polybus.model.access_rule import Rule
from polybus.model.commit import Commit, RecordChange
from polybus.model.identity import Identity
from tests.unit.pirate.server.memory_subscribers import MemorySubscribers


def stored(world: MemorySubscribers, family: bytes) -> int:
    return len(world.store.scan(family))


def test_the_first_sub_makes_the_topic_with_one_shard_that_keeps_what_is_unread(world):
    caller = Identity(uid=1000)
    assert world.client().sub("t", caller) == 0
    topic = world.durable.get("t")
    assert topic.generations == (1,)
    assert topic.settings["keep"] == "read"
    assert topic.settings[CREATOR]["uid"] == 1000


def test_a_subscriber_begins_at_the_newest_id_and_a_new_sub_does_not_move_it(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    first.put("t")
    first.put("t")
    assert second.sub("t") == 2
    first.put("t")
    assert second.sub("t") == 2
    assert second.get("t", 3) is None
    assert second.sub("t") == 3


def test_a_lost_answer_to_a_sub_is_given_again(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    first.put("t")
    first.put("t")
    sub = Request(SUB, b"b", 1, 1, "t")
    assert world.ask(sub) == 2
    first.put("t")
    first.put("t")
    assert world.ask(sub) == 2
    assert second.get("t").id == 3


def test_unsub_tells_whether_it_was_subscribed(world):
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


def test_the_topic_goes_with_its_last_subscriber_and_its_ids_go_on(world):
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


def test_who_subscribes_while_it_goes_gets_a_new_one(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    number = world.durable.get("t").number
    left = world.send(Request(b"UNSUB", b"a", 1, first.next(), "t"))
    came = world.send(Request(SUB, b"b", 1, second.next(), "t"))
    world.settle()
    assert (left, came) == ([1], [0])
    assert second.put("t") == 1
    # Whoever of the two was first: it is there, and has a subscriber.
    assert world.durable.get("t").number >= number
    assert [one.key.client for one in world.subscriptions()] == [b"b"]


def test_a_topic_that_a_group_reads_stays_and_goes_after_it(world):
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


def test_a_topic_that_others_made_stays(world):
    world.store.create("t", 2, {"keep": "read"})
    world = world.again()
    client = world.client()
    assert client.sub("t") == 0
    assert client.unsub("t") == 1
    assert world.durable.find("t") is not None


def test_subscriptions_are_found_again_after_a_restart(world):
    client = world.client()
    client.sub("t")
    client.put("t")
    client.put("t")
    assert client.get("t", 1).id == 2
    again = world.again()
    (found,) = again.subscriptions()
    assert (found.key.client, found.last, found.saved) == (b"c", 1, 1)


def test_a_topic_whose_maker_died_before_it_was_subscribed_goes(world):
    world.store.create("t", 1, {"keep": "read", "with_subscribers": True})
    again = world.again()
    again.collect()
    assert again.durable.find("t") is None


def test_subscriptions_of_a_dropped_topic_are_gone_and_so_are_their_records(world):
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


def test_records_of_a_topic_that_was_dropped_behind_our_back_are_swept(world):
    world.client().sub("t")
    world.store.drop("t")
    again = world.again()
    assert again.subscriptions() == []
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 0
    )


def test_an_ephemeral_topic_is_denied_and_that_is_stored(world):
    client = world.client()
    world.ephemeral.add(b"t")
    assert isinstance(client.sub("t"), WrongKind)
    put = Request(PUT, b"c", 1, 9, "t", (b"x",))
    assert isinstance(world.ask(put), WrongKind)
    world.ephemeral.clear()
    assert isinstance(world.ask(put), WrongKind)
    assert client.unsub("t").__class__.__name__ == "Stale"  # its counter is behind 9


def test_what_the_policy_denies_is_stored(world):
    eve, bob = Identity(uid=1), Identity(uid=2)
    client = world.client()
    client.sub("t", bob)
    rule = Rule.parse(f"deny user:{eve.uid} produce,subscribe *")
    world.policy.replace([PlacedRule(rule, "test", eve.uid)])
    assert isinstance(client.put("t", caller=eve), Denied)
    assert isinstance(client.sub("u", eve), Denied)
    assert isinstance(client.get("t", caller=eve), Denied)
    assert client.put("t", caller=bob) == 1


def test_too_many_subscriptions_are_told_so():
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


def test_what_could_not_be_written_uses_no_counter(world, monkeypatch):
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


def test_a_dead_subscriber_can_be_dropped(world):
    client = world.client()
    client.sub("t")
    client.sub("u")
    told: list[object] = []
    gone = [one for one in world.subscriptions() if one.key.topic == 1]
    world.bus.drop(gone, told.append)
    world.settle()
    assert told == [[]]
    assert len(world.subscriptions()) == 1
    assert world.durable.find("t") is None


def test_all_that_a_dead_subscriber_has_can_be_dropped_at_once():
    world = MemorySubscribers(max_client_requests=2)
    client = world.client()
    for number in range(5):
        client.sub(f"t{number}")
    told: list[object] = []
    world.bus.drop(world.subscriptions(), told.append)
    world.settle()
    assert told == [[]]
    assert world.subscriptions() == []
    assert world.durable.topics() == []


def test_what_a_subscriber_asks_for_while_it_is_dropped_waits_for_that(world):
    """Else it would be written down what it has read, of a subscription that is gone."""
    client = world.client()
    client.sub("t")
    client.put("t")
    told: list[object] = []
    world.bus.drop(world.subscriptions(), told.append)
    came = world.send(Request(GET, b"c", client.epoch, 0, "t", (), 1))
    again = world.send(Request(SUB, b"c", client.epoch, client.next(), "t"))
    world.bus.on_turn_end()
    world.settle()
    assert told == [[]]
    assert isinstance(came[0], DoesNotExist)
    assert again == [1]
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 1
    )


def test_a_subscription_that_ended_before_it_was_dropped_takes_no_other_with_it(world):
    world.client(b"keeper").sub("t")  # else the topic would go, too
    client = world.client()
    client.sub("t")
    gone = [one for one in world.subscriptions() if one.key.client == b"c"]
    world.send(Request(UNSUB, b"c", client.epoch, client.next(), "t"))
    world.send(Request(SUB, b"c", client.epoch, client.next(), "t"))
    told: list[object] = []
    world.bus.drop(gone, told.append)
    world.settle()
    assert told == [[]]
    assert client.get("t") is None
    assert (
        stored(world, subscriber_records.SUBSCRIPTIONS)
        == stored(world, subscriber_records.LASTS)
        == 2
    )


def test_a_copy_of_a_sub_that_was_dropped_since_subscribes_nobody(world):
    """It gets its answer again, and that is all."""
    world.client(b"keeper").sub("t")
    client = world.client()
    assert client.sub("t") == 0
    world.bus.drop([one for one in world.subscriptions() if one.key.client == b"c"], print)
    world.settle()
    assert world.ask(Request(SUB, b"c", client.epoch, client.counter, "t")) == 0
    assert [one.key.client for one in world.subscriptions()] == [b"keeper"]
    assert isinstance(client.get("t"), DoesNotExist)


def test_a_subscriber_that_is_away_for_too_long_is_dropped_and_counted():
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
