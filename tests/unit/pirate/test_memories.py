"""Bus and client with different state: the client reports the cause and the remedy."""

from __future__ import annotations

import copy
import shutil

import pytest

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client.requester import Fate
from polybus.dialects.pirate.codec import OkReply
from polybus.errors import Conflict, Fenced, OutcomeUnknown, Stale
from tests.rig.pirate.model_server import ModelServer
from tests.unit.pirate.conftest import losing


def bodies(client, topic):
    return [one.body for one in client.messages(topic, wait=False)]


def check_notice(client, *words):
    assert any(all(word in one for word in words) for one in client.notices), client.notices


# --- the same id twice


def test_older_of_two_clients_with_one_id_is_fenced(opening, keeper, topic):
    first, second = opening("a", id=topic[-60:]), opening("b", id=topic[-60:])
    with pytest.raises(Fenced, match=r"another client with this id has started.*stop the other"):
        first.put(topic, b"mine")
    for ask in (
        lambda: first.get(topic),
        lambda: first.put(topic, b""),
        first.resume,
        first.forget,
    ):
        with pytest.raises(Fenced):  # it never takes a new epoch by itself
            ask()
    assert second.put(topic, b"yours") == 1
    assert bodies(keeper, topic) == [b"yours"]


def test_fenced_client_cannot_read(opening, keeper, topic):
    first = opening("a", id=topic[-60:])
    first.subscribe(topic)
    keeper.put(topic, b"one")
    opening("b", id=topic[-60:])
    with pytest.raises(Fenced):
        first.get(topic)


def test_fenced_put_stays_pending_until_the_next_start(opening, keeper, topic):
    first = opening("a", id=topic[-60:])
    opening("b", id=topic[-60:])
    with pytest.raises(Fenced):
        first.put(topic, b"mine")
    assert first.pending is not None
    first.close()
    assert opening("a", id=topic[-60:]).resume().value == 1
    assert bodies(keeper, topic) == [b"mine"]


def test_late_copy_of_hello_fences_no_client(gate, opening, keeper, topic):
    opening("a", gate.endpoint).close()
    late = gate.requests[0]
    client = opening("a", gate.endpoint)
    assert codec.decode_reply(gate.again(late)) == OkReply(1, 0)  # the epoch that it had
    assert client.put(topic, b"here") == 1
    assert codec.decode_reply(gate.again(late)) == OkReply(1, 1)
    assert client.put(topic, b"still") == 2


def test_repeated_hello_opens_one_epoch(gate, opening, keeper, topic):
    gate.lose_replies = 1
    client = opening("a", gate.endpoint)
    assert len(gate.requests) >= 2
    assert gate.requests[0] == gate.requests[1]
    assert client.put(topic, b"here") == 1


# --- a state folder that is old, or new


def test_restored_folder_continues_above_the_counter_of_the_bus(opening, keeper, topic, tmp_path):
    client = opening("a")
    client.subscribe(topic)
    keeper.put(topic, b"one")
    assert client.get(topic).body == b"one"
    client.close()
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    client = opening("a")
    client.put(topic, b"two")
    assert bodies(client, topic) == [b"two"]
    client.close()
    restored = opening("backup")
    check_notice(restored, "old copy", "up to counter 1, the bus up to 2", "continue from 3")
    assert restored.put(topic, b"three") == 3
    # The bus knows the messages that were read after the copy, except the last.
    assert bodies(restored, topic) == [b"three"]


def test_restored_folder_with_outdated_pending_request(gate, opening, keeper, topic, tmp_path):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"one")
    client.close()
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    client = opening("a")
    client.resume()
    client.put(topic, b"two")
    client.close()
    restored = opening("backup")
    check_notice(restored, "old copy", "PUT", "(counter 1), is outdated; forget it")
    for ask in (restored.resume, lambda: restored.put(topic, b"three")):
        with pytest.raises(Stale, match=r"this state folder is an old copy.*forget it"):
            ask()
    assert restored.forget() is Fate.UNKNOWN
    assert restored.put(topic, b"three") == 3
    assert bodies(keeper, topic) == [b"one", b"two", b"three"]


def test_lost_folder_continues_from_the_positions_of_the_bus(opening, keeper, topic):
    client = opening("a", id=topic[-60:])
    client.subscribe(topic)
    for body in (b"one", b"two"):
        keeper.put(topic, body)
    assert bodies(client, topic) == [b"one", b"two"]  # the bus knows both
    client.put(topic, b"three")
    client.get(topic)  # and not of this one, because the client is not closed
    again = opening("b", id=topic[-60:])
    check_notice(again, "this state folder is new", "continue from 3", "may be delivered again")
    assert again.put(topic, b"four") == 4
    assert bodies(again, topic) == [b"three", b"four"]


def test_usual_start_has_no_notices(opening, keeper, topic):
    for _ in range(3):
        client = opening("a")
        client.subscribe(topic)
        client.put(topic, b"")
        client.get(topic)
        assert client.notices == ()
        client.close()


# --- a bus that went back


@pytest.fixture
def model():
    """A server whose memory can be set back: a real one needs a backup for that."""
    with ModelServer() as server:
        yield server


def test_restored_bus_is_reported_and_its_topics_are_in_doubt(opening, model):
    client = opening("a", model.endpoint)
    client.subscribe("news")
    client.put("news", b"one")
    backup = copy.deepcopy(model.model)
    client.put("news", b"two")
    assert bodies(client, "news") == [b"one", b"two"]
    client.close()
    model.model = backup
    client = opening("a", model.endpoint)
    check_notice(
        client, "restored from a backup", "had 1 and 3", "Before news can be read", "--reread"
    )
    client.put("news", b"new two")
    client.put("news", b"three")
    for _ in range(2):
        with pytest.raises(Conflict, match=r"restored from a backup.*reread=True"):
            client.get("news")
        client.close()
        client = opening("a", model.endpoint)  # it is not forgotten
    client.close()
    client = opening("a", model.endpoint, reread=True)
    assert bodies(client, "news") == [b"one", b"new two", b"three"]


def test_resubscribing_ends_the_doubt(opening, model):
    client = opening("a", model.endpoint)
    client.subscribe("news")
    backup = copy.deepcopy(model.model)
    client.put("news", b"one")
    assert bodies(client, "news") == [b"one"]
    client.close()
    model.model = backup
    client = opening("a", model.endpoint)
    with pytest.raises(Conflict):
        client.get("news")
    client.unsubscribe("news")
    client.subscribe("news")
    client.put("news", b"two")
    assert bodies(client, "news") == [b"two"]


def test_bus_restored_within_one_epoch_is_detected(opening, model):
    client = opening("a", model.endpoint)
    client.subscribe("news")
    backup = copy.deepcopy(model.model)
    client.put("news", b"one")
    assert bodies(client, "news") == [b"one"]
    model.model = backup
    with pytest.raises(Conflict, match="restored from a backup"):
        client.get("news")  # LAST is above the newest id
    check_notice(client, "was read up to 1, and the bus has no such id")


def test_reused_message_id_is_detected(opening, model):
    client = opening("a", model.endpoint)
    client.subscribe("news")
    backup = copy.deepcopy(model.model)
    client.put("news", b"one")
    assert bodies(client, "news") == [b"one"]
    model.model = backup
    assert client.put("news", b"new one") == 1
    check_notice(client, "it returned the id 1, and 1 was already read")
    with pytest.raises(Conflict):
        client.get("news")


def test_bus_restored_to_an_earlier_epoch_fences_the_client(opening, model):
    backup = copy.deepcopy(model.model)
    client = opening("a", model.endpoint)
    model.model = backup
    with pytest.raises(Fenced, match="or the bus was restored from a backup"):
        client.subscribe("news")
