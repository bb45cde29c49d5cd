"""The guarantees of the client."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from itertools import islice

import pytest

from polybus import pirate
from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client import request_channel
from polybus.dialects.pirate.client.journal_state import Outcome, Pending
from polybus.dialects.pirate.client.pirate_options import ClientOptions, Order
from polybus.dialects.pirate.client.state_folder import ClientFolder
from polybus.errors import (
    AddressError,
    DataFolderInUse,
    DoesNotExist,
    InvalidTopic,
    NotConnected,
    OutcomeUnknown,
    TooLarge,
    UsageError,
)
from tests.rig.observer import eventually, until
from tests.rig.pirate.gate import ALL
from tests.rig.relay import Relay
from tests.unit.pirate.conftest import PATIENT, QUICK, losing

MIB = 1 << 20
SMALL_BYTES = 4096


def bodies(client, topic, **how):
    return [one.body for one in client.messages(topic, wait=False, **how)]


# --- asking


def test_message_is_read_with_id_and_timestamp(keeper, topic):
    assert keeper.put(topic, b"hello") == 1
    message = keeper.get(topic)
    assert (message.topic, message.id, message.body) == (topic, 1, b"hello")
    assert message.timestamp_ns > 0
    assert keeper.get(topic) is None


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, 5 * 2**20 + 3])
def test_bodies_of_all_sizes_round_trip(keeper, topic, size):
    body = bytes(range(256)) * (size // 256 + 1)
    keeper.put(topic, body[:size])
    assert keeper.get(topic).body == body[:size]


def test_body_over_the_limit_is_not_recorded(keeper, topic):
    with pytest.raises(TooLarge):
        keeper.put(topic, bytes(codec.MAX_MESSAGE_BYTES + 1))
    assert keeper.counter == 1


def test_bytes_like_objects_are_bodies(keeper, topic):
    for body in (bytearray(b"a"), memoryview(b"b")):
        keeper.put(topic, body)
    assert bodies(keeper, topic) == [b"a", b"b"]


def test_put_to_missing_topic_is_refused_and_settled(opening, topic):
    client = opening()
    with pytest.raises(DoesNotExist, match="NO_TOPIC"):
        client.put(topic, b"")
    assert client.pending is None
    assert client.outcome == Outcome(1, "PUT", topic, None, "NO_TOPIC")


def test_get_without_subscription_is_refused(opening, keeper, topic):
    with pytest.raises(DoesNotExist, match="NOT_SUBSCRIBED"):
        opening().get(topic)


def test_unsubscribe_returns_whether_it_was_subscribed(opening, topic):
    client = opening()
    client.subscribe(topic)
    assert client.subscriptions == {topic: 0}
    assert client.unsubscribe(topic) is True
    assert client.unsubscribe(topic) is False
    assert client.subscriptions == {}
    with pytest.raises(DoesNotExist):
        client.get(topic)


def test_ids_continue_after_a_topic_is_removed_and_recreated(opening, topic):
    client = opening()
    client.subscribe(topic)
    client.put(topic, b"old")
    client.unsubscribe(topic)
    assert client.subscribe(topic) == 1
    assert client.put(topic, b"new") == 2
    assert bodies(client, topic) == [b"new"]


@pytest.mark.parametrize("name", ["", "a,b", "_own", "a*", "a\nb", "x" * 256])
def test_invalid_topic_names_are_not_sent(opening, name):
    client = opening()
    for ask in (client.subscribe, client.unsubscribe, client.get):
        with pytest.raises(InvalidTopic):
            ask(name)
    with pytest.raises(InvalidTopic):
        client.put(name, b"")
    assert client.counter == 0


def test_topic_name_must_be_text(opening):
    with pytest.raises(InvalidTopic, match="is text"):
        opening().subscribe(b"news")


# --- a request whose outcome is not known


def test_pending_request_is_sent_before_the_next_request(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown, match="it is stored"), losing(gate, client, "requests"):
        client.put(topic, b"first")
    assert client.pending == Pending(1, "PUT", topic, b"first")
    assert client.put(topic, b"second") == 2
    assert any("was executed: 1" in one for one in client.notices)
    assert bodies(keeper, topic) == [b"first", b"second"]


def test_pending_request_survives_a_restart_of_the_client(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"first")
    client.close()
    again = opening("a", gate.endpoint)
    assert any("is unknown" in one for one in again.notices)
    assert again.resume() == Outcome(1, "PUT", topic, 1)
    assert again.resume() is None
    assert again.outcome == Outcome(1, "PUT", topic, 1)
    assert bodies(keeper, topic) == [b"first"]


def test_refusal_of_a_pending_request_is_reported_on_resume(gate, opening, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"first")
    assert client.resume() == Outcome(1, "PUT", topic, None, "NO_TOPIC")


def test_get_works_while_a_request_is_pending(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    client.subscribe(topic)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"first")
    assert client.get(topic).body == b"first"
    assert client.resume().value == 1
    assert client.notices == ()  # the bus did not go back: it was our own
    assert client.get(topic) is None


def test_forget_reports_a_used_counter(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"first")
    assert client.forget() is pirate.Fate.USED
    assert client.pending is None
    assert client.put(topic, b"second") == 2
    assert client.counter == 2


def test_forgotten_request_is_fenced(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown), losing(gate, client, "requests"):
        client.put(topic, b"first")
    late = gate.requests[-1]
    assert client.forget() is pirate.Fate.NEVER
    refused = codec.decode_reply(gate.again(late))
    assert isinstance(refused, codec.ErrorReply)
    assert refused.code == codec.FENCED
    assert client.put(topic, b"second") == 1
    assert client.counter == 2  # not used again
    assert bodies(keeper, topic) == [b"second"]


def test_forget_without_pending_request_returns_none(opening):
    client = opening()
    assert client.forget() is None
    assert client.outcome is None


def test_cancelled_put_stays_pending_and_is_executed(gate, keeper, topic, tmp_path):
    async def main():
        async with pirate.connect(gate.endpoint, state=tmp_path / "a", **QUICK) as client:
            gate.lose_requests = 1
            putting = asyncio.create_task(client.put(topic, b"first"))
            await eventually(lambda: client.pending, "it is in the journal")
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            assert client.pending is not None
            gate.lose_requests = 0
            return await client.put(topic, b"second")

    assert asyncio.run(main()) == 2
    assert bodies(keeper, topic) == [b"first", b"second"]


def cancelled_after(step, work):
    """Cancel the work after `step` fifths of a millisecond. Returns its result or exception."""

    async def run():
        task = asyncio.ensure_future(work)
        await asyncio.sleep(step / 5000)
        task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    return run()


def test_cancelled_puts_are_executed_at_most_once(endpoint, keeper, topic, tmp_path):
    async def main():
        done = []
        async with pirate.connect(endpoint, state=tmp_path / "a", **PATIENT) as client:
            for step in range(40):
                returned = await cancelled_after(step, client.put(topic, b"%d" % step))
                done += [step] * isinstance(returned, int)
            await client.resume()
        return done

    done = asyncio.run(main())
    found = [int(body) for body in bodies(keeper, topic)]
    assert found == sorted(set(found))
    assert set(done) <= set(found)
    assert len(found) < 40  # some were cancelled before they were kept
    ClientFolder(tmp_path / "a").close()  # the journal can be read


@pytest.mark.parametrize("order", list(Order))
def test_cancelled_readers_lose_no_message(endpoint, keeper, topic, tmp_path, order):
    async def main():
        found = []
        async with pirate.connect(endpoint, state=tmp_path / "a", **PATIENT) as client:
            await client.subscribe(topic)
            for number in range(20):
                await client.put(topic, b"%d" % number)
            for step in range(60):
                message = await cancelled_after(step, client.get(topic, order=order))
                if isinstance(message, pirate.Message):
                    found.append(message)
                    await client.record(message)
            found += [one async for one in client.messages(topic, order=order, wait=False)]
        return found

    assert [one.id for one in asyncio.run(main())] == list(range(1, 21))


def test_unsubscribe_drops_the_message_kept_for_a_cancelled_reader(keeper, topic):
    keeper.put(topic, b"old")
    keeper._async._require_opened()._undelivered[topic] = keeper.get(topic)
    keeper.unsubscribe(topic)
    keeper.subscribe(topic)
    assert keeper.get(topic) is None


# --- reading


@pytest.mark.parametrize("order", list(Order))
def test_messages_are_delivered_once_and_in_order(opening, keeper, topic, order):
    client = opening()
    client.subscribe(topic)
    wanted = [b"%d" % number for number in range(20)]
    for body in wanted[:10]:
        keeper.put(topic, body)
    assert bodies(client, topic, order=order) == wanted[:10]
    client.close()
    for body in wanted[10:]:
        keeper.put(topic, body)
    assert bodies(opening(), topic, order=order) == wanted[10:]


def test_unrecorded_message_is_delivered_again(opening, keeper, topic):
    keeper.put(topic, b"one")
    for _ in range(2):
        message = keeper.get(topic, order="deliver-then-record")
        assert message.body == b"one"
    keeper.record(message)
    assert keeper.get(topic, order="deliver-then-record") is None


def test_recorded_message_is_not_delivered_again(opening, keeper, topic):
    client = opening()
    client.subscribe(topic)
    keeper.put(topic, b"one")
    client.get(topic, order="record-then-deliver")  # the caller is gone
    client.close()
    assert opening().get(topic) is None


def test_close_sends_the_recorded_positions(opening, keeper, topic):
    """A client that lost its folder learns from SUB how far the bus knows it to have read."""
    client = opening("a", id=topic[-60:])
    client.subscribe(topic)
    for body in (b"one", b"two", b"three"):
        keeper.put(topic, body)
    assert client.get(topic).body == b"one"
    client.record(client.get(topic, order="deliver-then-record"))
    client.close()
    client.close()
    assert opening("b", id=topic[-60:]).subscribe(topic) == 2


def test_close_sends_only_positions_that_have_moved(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    client.subscribe(topic)
    keeper.put(topic, b"one")
    assert client.get(topic).body == b"one"
    assert client.get(topic) is None  # carries LAST
    sent = len(gate.requests)
    client.close()
    assert len(gate.requests) == sent


def test_close_does_not_wait_for_a_bus_that_is_away(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    client.subscribe(topic)
    keeper.put(topic, b"one")
    client.get(topic)
    gate.lose_requests = ALL
    client.close()
    gate.lose_requests = 0
    again = opening("a", gate.endpoint)
    assert again.subscriptions == {topic: 1}
    assert again.get(topic) is None


def test_break_leaves_the_last_message_unread(opening, keeper, topic):
    for body in (b"one", b"two"):
        keeper.put(topic, body)
    for message in keeper.messages(topic):
        if message.body == b"two":
            break
    assert keeper.subscriptions == {topic: 1}
    assert keeper.get(topic).body == b"two"


def test_messages_waits_for_new_messages(opening, keeper, topic):
    client = opening(poll_s=0.01)
    client.subscribe(topic)
    bodies = []

    def read():
        bodies.extend(one.body for one in islice(client.messages(topic), 2))

    reading = threading.Thread(target=read)
    reading.start()
    for body in (b"one", b"two"):
        keeper.put(topic, body)
    reading.join(20)
    assert bodies == [b"one", b"two"]


def test_many_tasks_share_a_client(endpoint, tmp_path, topic):
    async def main():
        async with pirate.connect(endpoint, state=tmp_path / "a", **PATIENT) as client:
            await client.subscribe(topic)
            await asyncio.gather(*(client.put(topic, b"%d" % number) for number in range(30)))
            return [one async for one in client.messages(topic, wait=False)]

    found = asyncio.run(main())
    assert [one.id for one in found] == list(range(1, 31))
    assert {one.body for one in found} == {b"%d" % number for number in range(30)}


def test_unknown_order_is_rejected(keeper, topic):
    with pytest.raises(UsageError, match="record-then-deliver or deliver-then-record"):
        keeper.get(topic, order="at-most-once")


# --- opening and closing


def test_unreachable_bus_is_reported_and_the_folder_released(opening, tmp_path):
    with pytest.raises(NotConnected, match=r"no bus answers at tcp://127.0.0.1:1; .*\(2 tries"):
        opening(server="tcp://127.0.0.1:1", tries=2, timeout_s=0.05)
    opening()


def test_silent_bus_is_distinguished_from_unreachable_bus(gate, opening):
    gate.lose_requests = ALL
    with pytest.raises(NotConnected, match=f"the bus at {gate.endpoint} does not answer"):
        opening(server=gate.endpoint, timeout_s=0.5, tries=1)


def test_invalid_address_is_rejected(opening):
    with pytest.raises(AddressError):
        opening(server="nonsense")


def test_state_folder_has_one_client_at_a_time(opening):
    opening()
    with pytest.raises(DataFolderInUse):
        opening()


def test_closed_client_raises_not_connected(opening, topic):
    client = opening()
    client.close()
    client.close()
    with pytest.raises(NotConnected, match="closed"):
        client.put(topic, b"")


def test_unopened_client_raises_usage_error(tmp_path):
    client = pirate.blocking.connect(state=tmp_path)
    with pytest.raises(UsageError, match="not open"):
        client.subscribe("news")


def test_client_can_be_opened_once(opening):
    with pytest.raises(UsageError, match="can be opened once"):
        opening().open()


@pytest.mark.parametrize(
    ("setting", "value"), [("timeout_s", 0), ("tries", 0), ("poll_s", 0), ("jitter_s", -1)]
)
def test_invalid_options_are_rejected(setting, value):
    with pytest.raises(UsageError, match=setting):
        ClientOptions(**{setting: value})


@pytest.mark.parametrize("chosen", ["", "x" * 65, "hex:0g", b"", b"x" * 65])
def test_invalid_client_ids_are_rejected(chosen, tmp_path):
    with pytest.raises(UsageError, match="id"):
        pirate.connect(id=chosen, state=tmp_path)


def test_client_ids_are_bytes_or_text(opening, topic):
    assert opening("a", id=f"me-{topic}").id == f"me-{topic}".encode()
    assert opening("b", id="hex:00ff").id == b"\x00\xff"
    assert len(opening("c").id) == 16


def test_timeout_is_extended_while_bytes_move(opening, endpoint, keeper, topic):
    """Else each try would start again, and never end."""
    body = bytes(MIB) * 2
    keeper.put(topic, body)

    def slow_link(piece: bytes) -> bytes:
        if len(piece) > SMALL_BYTES:
            time.sleep(0.04)  # its 64 KiB
        return piece

    with Relay(int(endpoint.rpartition(":")[2]), change=slow_link) as relay:
        server = f"tcp://127.0.0.1:{relay.port}"
        reader = opening("slow", server, id=keeper.id, timeout_s=0.5, tries=10)
        assert reader.get(topic).body == body


def test_transfer_mark_counts_bytes_of_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            before = request_channel.read_mark(near.fileno())
            far.sendall(bytes(request_channel.MIN_PROGRESS_BYTES - 1))
            until(
                lambda: (
                    request_channel.read_mark(near.fileno()).moved
                    >= request_channel.MIN_PROGRESS_BYTES - 1
                ),
                "it came",
            )
            assert not request_channel.has_moved(before, request_channel.read_mark(near.fileno()))
            near.sendall(b"x")
            until(
                lambda: request_channel.has_moved(before, request_channel.read_mark(near.fileno())),
                "it went",
            )
            new = request_channel.read_mark(near.fileno())
            assert request_channel.has_moved(new._replace(fd=-1), new), (
                "a new one begins with nothing"
            )
            assert not request_channel.has_moved(new, new)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert request_channel.read_mark(ours.fileno()).moved == 0
    assert request_channel.read_mark(-1).moved == 0
