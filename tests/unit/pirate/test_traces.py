"""The traces of the seed, step by step. Its counters start at 0, ours at 1."""

from __future__ import annotations

import pytest

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client.journal_state import Outcome
from polybus.dialects.pirate.codec import ClientRequest, OkReply
from polybus.errors import OutcomeUnknown
from tests.unit.pirate.conftest import losing


def requests(gate, op):
    """Return the requests with this op that passed the gate."""
    parsed = [codec.parse_request(frames) for frames in gate.requests]
    return [one for one in parsed if isinstance(one, ClientRequest) and one.op == op]


def sent(gate, op, client):
    """The counters of a client's requests of this kind."""
    return [one.counter for one in requests(gate, op) if one.client == client.id]


# --- "SUB -> ACK(2) -- client doesn't receive this ACK … SUB -> ACK(2) or ACK(4)"


def test_repeated_sub_gets_its_first_answer(gate, opening, keeper, topic):
    assert [keeper.put(topic, body) for body in (b"mensagem1", b"mensagem2")] == [1, 2]
    client = opening("late", gate.endpoint)
    with pytest.raises(OutcomeUnknown, match="is unknown"), losing(gate, client):
        client.subscribe(topic)
    assert [keeper.put(topic, body) for body in (b"mensagem3", b"mensagem4")] == [3, 4]
    assert client.resume() == Outcome(1, "SUB", topic, 2)
    assert set(sent(gate, codec.SUB, client)) == {1}
    assert codec.encode_ok(1, 2) in gate.replies
    assert [one.body for one in client.messages(topic, wait=False)] == [b"mensagem3", b"mensagem4"]


def test_lost_sub_answer_is_retried_within_one_call(gate, opening, keeper, topic):
    keeper.put(topic, b"mensagem1")
    client = opening("late", gate.endpoint)
    gate.lose_replies = 1
    assert client.subscribe(topic) == 1
    assert set(sent(gate, codec.SUB, client)) == {1}


def test_second_sub_does_not_move_last(gate, opening, keeper, topic):
    keeper.put(topic, b"mensagem1")
    keeper.put(topic, b"mensagem2")
    client = opening("late", gate.endpoint)
    assert client.subscribe(topic) == 2
    keeper.put(topic, b"mensagem3")
    keeper.put(topic, b"mensagem4")
    assert client.subscribe(topic) == 2  # not 4
    assert sorted(set(sent(gate, codec.SUB, client))) == [1, 2]
    assert client.get(topic).body == b"mensagem3"
    assert client.get(topic).body == b"mensagem4"


# --- PUT: the ACK that was not sent, and two clients with their counters


def test_repeated_put_is_stored_once_per_client_counter(gate, opening, keeper, topic):
    a, b = opening("a", gate.endpoint), opening("b", gate.endpoint)
    gate.lose_replies = 1  # "server doesn't send ACK, so client tries again"
    assert a.put(topic, b"msg") == 1
    assert set(sent(gate, codec.PUT, a)) == {1}
    assert a.counter == 1

    assert b.put(topic, b"another_msg") == 2
    assert b.put(topic, b"another_another_msg") == 3
    assert sorted(set(sent(gate, codec.PUT, b))) == [1, 2]
    assert (a.counter, b.counter) == (1, 2)

    read = [(one.id, one.body) for one in keeper.messages(topic, wait=False)]
    assert read == [(1, b"msg"), (2, b"another_msg"), (3, b"another_another_msg")]


def test_put_with_a_lost_request_is_stored_once(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    gate.lose_requests = 1
    assert client.put(topic, b"msg") == 1
    assert client.put(topic, b"more") == 2


def test_late_copy_of_a_put_changes_nothing(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    client.put(topic, b"msg")
    late = gate.requests[-1]
    assert codec.decode_reply(gate.again(late)) == OkReply(1, 1)  # the stored reply
    client.put(topic, b"more")
    refused = codec.decode_reply(gate.again(late))
    assert isinstance(refused, codec.ErrorReply)
    assert refused.code == codec.STALE
    assert [one.body for one in keeper.messages(topic, wait=False)] == [b"msg", b"more"]


# --- GET: "Client sends new GET requests until NO_MESSAGES_LEFT_TO_READ is returned"


def test_get_carries_last_until_no_message_is_left(gate, opening, keeper, topic):
    client = opening("b", gate.endpoint)
    client.subscribe(topic)
    for body in (b"one", b"two"):
        keeper.put(topic, body)
    assert [one.body for one in client.messages(topic, wait=False)] == [b"one", b"two"]
    assert sorted({one.last for one in requests(gate, codec.GET)}) == [0, 1, 2]
    assert gate.replies[-1] == [codec.NONE]


def test_lost_get_answer_loses_no_message(gate, opening, keeper, topic):
    client = opening("b", gate.endpoint)
    client.subscribe(topic)
    keeper.put(topic, b"one")
    gate.lose_replies = 1
    assert client.get(topic).body == b"one"
    assert client.get(topic) is None
