"""The pirate session: decodes requests, executes them, and encodes the replies.

One session serves all connections of all listeners: the request names the client, not the
connection. No request is answered before its result is on disk. Unanswered requests are
counted, so that a stopping bus can wait for them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Protocol

from polybus.bus.counters import Counters
from polybus.bus.traffic import LoopTraffic
from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client_id import fingerprint
from polybus.dialects.pirate.server.client_table import HelloResult
from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
from polybus.errors import (
    Denied,
    DoesNotExist,
    Fenced,
    MalformedRequest,
    PolybusError,
    Stale,
    UnknownProducer,
    WrongKind,
)
from polybus.model.identity import Identity

OUTBOX_FULL_TEXT: Final = "earlier replies have not been received yet"


class RouterPeer(Protocol):
    """The connection that a request came from."""

    @property
    def identity(self) -> Identity: ...

    @property
    def key(self) -> bytes | None:
        """The CURVE key of the peer, 32 raw bytes."""

    def is_full(self) -> bool:
        """Return True if the peer has left too many sent bytes unread."""

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        """Send a reply: the envelope of the request, an empty frame, and `frames`."""


class PirateSession:
    """All pirate connections of a bus."""

    def __init__(self, subscribers: DurableSubscribers, counters: Counters) -> None:
        self._counters = counters
        self._subscribers = subscribers
        self._take_put = subscribers.take_put
        self.totals = LoopTraffic()
        self.requests = dict.fromkeys(sorted(codec.OPS), 0)
        self.unanswered = 0

    def receive(self, peer: RouterPeer, frames: list[bytes]) -> None:
        """Execute one message: its envelope, an empty frame, and the request."""
        key = peer.key
        # With CURVE the client id must be the fingerprint of the key.
        own_id = None if key is None else fingerprint(key)
        if self._take_put(self, peer, frames, own_id):
            self.requests[codec.PUT] += 1
            self.unanswered += 1
            return
        end = codec.envelope_end(frames)
        if end < 0:  # there is no way back to the sender, so the message cannot be answered
            self._counters.count("dropped", "pirate_no_envelope")
            return
        envelope = frames[:end]
        request = codec.parse_request(frames, end + 1)
        if isinstance(request, codec.ErrorReply):
            self._refuse(peer, envelope, request.code, request.text)
            return
        if own_id is not None and request.client != own_id:
            text = "the client id must be the fingerprint of the key"
            self._refuse(peer, envelope, codec.DENIED, text)
            return
        # A GET of a peer that leaves its replies unread is refused before the log is read for it.
        if request.op == codec.GET and peer.is_full():
            self._refuse(peer, envelope, codec.BUSY, OUTBOX_FULL_TEXT)
            return
        self.requests[request.op] += 1
        self.unanswered += 1
        size = sum(map(len, request.body))
        then = partial(self.answer, peer, envelope, request.op, request.counter, size)
        self._subscribers.handlers[request.op](request, peer.identity, then)

    def on_turn_end(self) -> None:
        self._subscribers.on_turn_end()

    def flush(self) -> None:
        self._subscribers.flush()

    def on_put_committed(self, size: int) -> None:
        """Count a committed PUT of `size` bytes."""
        self.unanswered -= 1
        self.totals.received += 1
        self.totals.received_bytes += size

    def answer(
        self,
        peer: RouterPeer,
        envelope: list[bytes],
        op: bytes,
        counter: int,
        size: int,
        result: Any,
    ) -> None:
        """Send the reply of a request. `size` is the size of its body."""
        if isinstance(result, int) and op == codec.PUT:
            self.on_put_committed(size)
            peer.send(envelope, codec.encode_ok(counter, result))
            return
        self.unanswered -= 1
        if isinstance(result, int):
            peer.send(envelope, codec.encode_ok(counter, result))
        elif result is None:
            peer.send(envelope, codec.encode_none())
        elif isinstance(result, PolybusError):
            self._refuse(peer, envelope, error_code(result, op), str(result))
        elif isinstance(result, HelloResult):
            peer.send(envelope, codec.encode_ok(result.epoch, result.counter))
        elif peer.is_full():  # it may have sent many GETs at once
            self._refuse(peer, envelope, codec.BUSY, OUTBOX_FULL_TEXT)
        else:
            self.totals.delivered += 1
            self.totals.delivered_bytes += len(result.body)
            peer.send(envelope, codec.encode_message(result.id, result.timestamp_ns, result.body))

    def _refuse(self, peer: RouterPeer, envelope: list[bytes], code: str, text: str) -> None:
        self._counters.count("refused", f"pirate_{code.lower()}")
        peer.send(envelope, codec.encode_error(code, text))


# Error class → code on the wire; the first matching row applies.
_CODES: Final[tuple[tuple[type[PolybusError], str], ...]] = (
    (UnknownProducer, codec.FENCED),
    (Fenced, codec.FENCED),
    (Stale, codec.STALE),
    (Denied, codec.DENIED),
    (WrongKind, codec.DENIED),
    (MalformedRequest, codec.MALFORMED),
)


def error_code(error: PolybusError, op: bytes) -> str:
    """Return the error code on the wire. Errors that a retry may fix are BUSY."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, DoesNotExist):
        return codec.NOT_SUBSCRIBED if op == codec.GET else codec.NO_TOPIC
    return codec.BUSY
