"""Replies that are invalid or rare, and the client's reports of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import zmq

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.codec import ClientRequest
from polybus.errors import (
    BadFrame,
    Denied,
    MalformedRequest,
    NotConnected,
    OutcomeUnknown,
    PeerError,
    TooLarge,
    Unavailable,
)

Frames = list[bytes]


class Puppet:
    """A server that answers HELLO itself; `answer` of the test handles all other requests."""

    def __init__(self) -> None:
        self.answer: Callable[[ClientRequest], Frames | None] = lambda _: None
        self.asked: list[ClientRequest] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._ended = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._ended:
            if self._socket.poll(20):
                self._answered(self._socket.recv_multipart())

    def _answered(self, frames: Frames) -> None:
        place = frames.index(b"")
        request = codec.parse_request(frames, place + 1)
        assert isinstance(request, ClientRequest)
        if request.op == codec.HELLO:
            reply: Frames | None = codec.encode_ok(1, 0)
        else:
            self.asked.append(request)
            reply = self.answer(request)
        if reply is not None:
            self._socket.send_multipart([*frames[:place], b"", *reply])


@pytest.fixture
def puppet() -> Iterator[Puppet]:
    one = Puppet()
    yield one
    one.close()


@pytest.fixture
def client(puppet, opening):
    return opening("client", puppet.endpoint, timeout_s=10, tries=2)


NO_ANSWERS: list[Frames] = [
    [],
    [b""],
    [b"YES"],
    [b"OK"],
    [b"OK", bytes(8)],
    [b"OK", bytes(8), bytes(7)],
    codec.encode_ok(2, 1),  # another counter
    codec.encode_none(),
    codec.encode_message(1, 1, b""),
    [b"ERR", b"BUSY"],
]


def test_invalid_reply_leaves_put_pending(puppet, client):
    for frames in NO_ANSWERS:
        puppet.answer = lambda _, frames=frames: frames
        with pytest.raises(OutcomeUnknown):
            client.put("news", b"")
        assert client.pending.counter == 1, frames


def test_invalid_reply_to_get_raises_bad_frame(puppet, client):
    for frames in (*NO_ANSWERS[:6], codec.encode_ok(1, 1), [b"MSG", bytes(8), bytes(8)]):
        puppet.answer = lambda _, frames=frames: frames
        with pytest.raises(BadFrame):
            client.get("news")


def test_reply_with_already_read_message_is_rejected(puppet, client):
    puppet.answer = lambda _: codec.encode_message(5, 1, b"")
    assert client.get("news").id == 5
    with pytest.raises(BadFrame):
        client.get("news")


@pytest.mark.parametrize(
    ("code", "error"),
    [(codec.DENIED, Denied), (codec.MALFORMED, MalformedRequest), (codec.TOO_LARGE, TooLarge)],
)
def test_final_codes_settle_a_request(puppet, client, code, error):
    puppet.answer = lambda _: codec.encode_error(code, "no")
    with pytest.raises(error, match=f"{code}: no"):
        client.put("news", b"")
    assert client.pending is None
    assert client.outcome.error == code


def test_unknown_error_code_leaves_request_pending(puppet, client):
    puppet.answer = lambda _: codec.encode_error("TIRED", "later")
    with pytest.raises(PeerError, match="TIRED: later"):
        client.put("news", b"")
    assert client.pending is not None
    with pytest.raises(PeerError):
        client.get("news")


def test_busy_is_retried_with_the_same_counter(puppet, client):
    busy = [codec.encode_error(codec.BUSY, "a moment")]
    puppet.answer = lambda _: busy.pop() if busy else codec.encode_ok(1, 7)
    assert client.put("news", b"") == 7
    assert [one.counter for one in puppet.asked] == [1, 1]


def test_request_to_a_busy_bus_has_unknown_outcome(puppet, client):
    puppet.answer = lambda _: codec.encode_error(codec.BUSY, "a moment")
    with pytest.raises(OutcomeUnknown, match="the bus is busy: a moment"):
        client.put("news", b"")
    assert client.pending is not None
    with pytest.raises(Unavailable, match="BUSY"):
        client.get("news")
    assert len(puppet.asked) == 4


def test_refused_hello_opens_no_client(puppet, opening, monkeypatch):
    monkeypatch.setattr(codec, "encode_ok", lambda *_: codec.encode_error(codec.DENIED, "not you"))
    with pytest.raises(Denied, match="HELLO: DENIED: not you"):
        opening("client", puppet.endpoint)


def test_reply_to_another_request_is_dropped(puppet, opening):
    """The client matches replies by the number before the empty frame, not by order."""
    client = opening("client", puppet.endpoint, timeout_s=0.2, tries=1)
    honest = puppet._socket.send_multipart

    def late(frames):
        honest([frames[0], codec.u64(99), *frames[2:]])

    puppet._socket.send_multipart = late
    puppet.answer = lambda _: codec.encode_message(1, 1, b"")
    with pytest.raises(NotConnected):
        client.get("news")
