"""What the client promises its user."""

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


def test_what_is_put_is_read_with_its_id_and_time(keeper, topic):
    assert keeper.put(topic, b"hello") == 1
    message = keeper.get(topic)
    assert (message.topic, message.id, message.body) == (topic, 1, b"hello")
    assert message.timestamp_ns > 0
    assert keeper.get(topic) is None


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, 5 * 2**20 + 3])
def test_bodies_of_all_sizes(keeper, topic, size):
    body = bytes(range(256)) * (size // 256 + 1)
    keeper.put(topic, body[:size])
    assert keeper.get(topic).body == body[:size]


def test_a_body_over_the_limit_is_not_even_kept(keeper, topic):
    with pytest.raises(TooLarge):
        keeper.put(topic, bytes(codec.MAX_MESSAGE_BYTES + 1))
    assert keeper.counter == 1


def test_what_holds_bytes_is_a_body(keeper, topic):
    for body in (bytearray(b"a"), memoryview(b"b")):
        keeper.put(topic, body)
    assert bodies(keeper, topic) == [b"a", b"b"]


def test_putting_to_a_topic_that_is_not_there_is_refused_once(opening, topic):
    client = opening()
    with pytest.raises(DoesNotExist, match="NO_TOPIC"):
        client.put(topic, b"")
    assert client.pending is None
    assert client.outcome == Outcome(1, "PUT", topic, None, "NO_TOPIC")


def test_reading_without_a_subscription_is_refused(opening, keeper, topic):
    with pytest.raises(DoesNotExist, match="NOT_SUBSCRIBED"):
        opening().get(topic)


def test_unsubscribing_says_whether_there_was_anything(opening, topic):
    client = opening()
    client.subscribe(topic)
    assert client.subscriptions == {topic: 0}
    assert client.unsubscribe(topic) is True
    assert client.unsubscribe(topic) is False
    assert client.subscriptions == {}
    with pytest.raises(DoesNotExist):
        client.get(topic)


def test_a_topic_that_went_and_came_does_not_repeat_its_ids(opening, topic):
    client = opening()
    client.subscribe(topic)
    client.put(topic, b"old")
    client.unsubscribe(topic)
    assert client.subscribe(topic) == 1
    assert client.put(topic, b"new") == 2
    assert bodies(client, topic) == [b"new"]


@pytest.mark.parametrize("name", ["", "a,b", "_own", "a*", "a\nb", "x" * 256])
def test_names_that_cannot_be_are_not_sent(opening, name):
    client = opening()
    for ask in (client.subscribe, client.unsubscribe, client.get):
        with pytest.raises(InvalidTopic):
            ask(name)
    with pytest.raises(InvalidTopic):
        client.put(name, b"")
    assert client.counter == 0


def test_a_name_is_text(opening):
    with pytest.raises(InvalidTopic, match="is text"):
        opening().subscribe(b"news")


# --- a request whose outcome is not known


def test_giving_up_keeps_the_request_and_the_next_one_sends_it_first(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown, match="it is stored"), losing(gate, client, "requests"):
        client.put(topic, b"first")
    assert client.pending == Pending(1, "PUT", topic, b"first")
    assert client.put(topic, b"second") == 2
    assert any("was executed: 1" in one for one in client.notices)
    assert bodies(keeper, topic) == [b"first", b"second"]


def test_the_kept_request_outlives_the_client(gate, opening, keeper, topic):
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


def test_what_was_refused_while_nobody_listened_is_told(gate, opening, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"first")
    assert client.resume() == Outcome(1, "PUT", topic, None, "NO_TOPIC")


def test_reading_goes_on_while_an_outcome_is_not_known(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    client.subscribe(topic)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"first")
    assert client.get(topic).body == b"first"
    assert client.resume().value == 1
    assert client.notices == ()  # the bus did not go back: it was our own
    assert client.get(topic) is None


def test_forgetting_says_that_the_bus_has_it(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    with pytest.raises(OutcomeUnknown), losing(gate, client):
        client.put(topic, b"first")
    assert client.forget() is pirate.Fate.USED
    assert client.pending is None
    assert client.put(topic, b"second") == 2
    assert client.counter == 2


def test_a_forgotten_request_that_never_came_never_will(gate, opening, keeper, topic):
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


def test_nothing_to_forget(opening):
    client = opening()
    assert client.forget() is None
    assert client.outcome is None


def test_a_cancelled_put_is_kept_and_carried_out(gate, keeper, topic, tmp_path):
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
    """Cancelled after so many fifths of a millisecond: what it returned, if it did."""

    async def run():
        task = asyncio.ensure_future(work)
        await asyncio.sleep(step / 5000)
        task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    return run()


def test_puts_that_are_cancelled_anywhere_are_done_once_or_not(endpoint, keeper, topic, tmp_path):
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
def test_readers_that_are_cancelled_anywhere_miss_nothing(endpoint, keeper, topic, tmp_path, order):
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


def test_what_was_kept_for_a_cancelled_reader_goes_with_the_subscription(keeper, topic):
    keeper.put(topic, b"old")
    keeper._async._require_opened()._undelivered[topic] = keeper.get(topic)
    keeper.unsubscribe(topic)
    keeper.subscribe(topic)
    assert keeper.get(topic) is None


# --- reading


@pytest.mark.parametrize("order", list(Order))
def test_every_message_once_and_in_order(opening, keeper, topic, order):
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


def test_delivered_and_not_recorded_it_comes_again(opening, keeper, topic):
    keeper.put(topic, b"one")
    for _ in range(2):
        message = keeper.get(topic, order="deliver-then-record")
        assert message.body == b"one"
    keeper.record(message)
    assert keeper.get(topic, order="deliver-then-record") is None


def test_recorded_and_not_delivered_it_does_not_come_again(opening, keeper, topic):
    client = opening()
    client.subscribe(topic)
    keeper.put(topic, b"one")
    client.get(topic, order="record-then-deliver")  # whoever asked is gone
    client.close()
    assert opening().get(topic) is None


def test_a_loop_that_is_left_has_not_read_its_last(opening, keeper, topic):
    for body in (b"one", b"two"):
        keeper.put(topic, body)
    for message in keeper.messages(topic):
        if message.body == b"two":
            break
    assert keeper.subscriptions == {topic: 1}
    assert keeper.get(topic).body == b"two"


def test_messages_wait_for_what_comes(opening, keeper, topic):
    client = opening(poll_s=0.01)
    client.subscribe(topic)
    came = []

    def read():
        came.extend(one.body for one in islice(client.messages(topic), 2))

    reading = threading.Thread(target=read)
    reading.start()
    for body in (b"one", b"two"):
        keeper.put(topic, body)
    reading.join(20)
    assert came == [b"one", b"two"]


def test_many_tasks_share_a_client(endpoint, tmp_path, topic):
    async def main():
        async with pirate.connect(endpoint, state=tmp_path / "a", **PATIENT) as client:
            await client.subscribe(topic)
            await asyncio.gather(*(client.put(topic, b"%d" % number) for number in range(30)))
            return [one async for one in client.messages(topic, wait=False)]

    found = asyncio.run(main())
    assert [one.id for one in found] == list(range(1, 31))
    assert {one.body for one in found} == {b"%d" % number for number in range(30)}


def test_an_order_that_there_is_not(keeper, topic):
    with pytest.raises(UsageError, match="record-then-deliver or deliver-then-record"):
        keeper.get(topic, order="at-most-once")


# --- opening and closing


def test_no_bus_is_told_and_the_folder_let_go(opening, tmp_path):
    with pytest.raises(NotConnected, match=r"no bus answers at tcp://127.0.0.1:1; .*\(2 tries"):
        opening(server="tcp://127.0.0.1:1", tries=2, timeout_s=0.05)
    opening()


def test_a_bus_that_is_silent_is_told_from_none(gate, opening):
    gate.lose_requests = ALL
    with pytest.raises(NotConnected, match=f"the bus at {gate.endpoint} does not answer"):
        opening(server=gate.endpoint, timeout_s=0.5, tries=1)


def test_an_address_that_is_none(opening):
    with pytest.raises(AddressError):
        opening(server="nonsense")


def test_one_folder_is_for_one_client(opening):
    opening()
    with pytest.raises(DataFolderInUse):
        opening()


def test_a_closed_client_says_so(opening, topic):
    client = opening()
    client.close()
    client.close()
    with pytest.raises(NotConnected, match="closed"):
        client.put(topic, b"")


def test_a_client_that_was_not_opened_says_so(tmp_path):
    client = pirate.blocking.connect(state=tmp_path)
    with pytest.raises(UsageError, match="not open"):
        client.subscribe("news")


def test_a_client_opens_once(opening):
    with pytest.raises(UsageError, match="can be opened once"):
        opening().open()


@pytest.mark.parametrize(
    ("setting", "value"), [("timeout_s", 0), ("tries", 0), ("poll_s", 0), ("jitter_s", -1)]
)
def test_settings_that_cannot_be(setting, value):
    with pytest.raises(UsageError, match=setting):
        ClientOptions(**{setting: value})


@pytest.mark.parametrize("chosen", ["", "x" * 65, "hex:0g", b"", b"x" * 65])
def test_ids_that_cannot_be(chosen, tmp_path):
    with pytest.raises(UsageError, match="id"):
        pirate.connect(id=chosen, state=tmp_path)


def test_ids_are_bytes_or_their_text(opening, topic):
    assert opening("a", id=f"me-{topic}").id == f"me-{topic}".encode()
    assert opening("b", id="hex:00ff").id == b"\x00\xff"
    assert len(opening("c").id) == 16


def test_a_message_that_takes_longer_than_a_try_is_waited_for_while_it_comes(
    opening, endpoint, keeper, topic
):
    """It would begin anew with each try, and never come."""
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


def test_what_moves_by_a_connection():
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
