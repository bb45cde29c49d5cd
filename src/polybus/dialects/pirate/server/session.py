"""Pirate's session: requests become verbs of the bus, what comes of them becomes replies.

One session serves all connections of all listeners: who a client is stands in the
request, not in the connection. Nothing is answered before it is on disk; requests that
wait for that are counted, so that a bus that stops can wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from polybus.bus.traffic import LoopTraffic
from polybus.dialects.pirate import codec
from polybus.dialects.pirate.server.client_table import HelloResult
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

if TYPE_CHECKING:
    from polybus.bus.counters import Counters
    from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers
    from polybus.model.identity import Identity

FINGERPRINT_BYTES = 16
KNOWN_KEYS = 4096  # whose fingerprints were made lately; some 200 bytes each
OUTBOX_FULL_TEXT = "answers sent before were not taken yet"


class RouterPeer(Protocol):
    """The connection by which a request came."""

    @property
    def identity(self) -> Identity: ...
    @property
    def key(self) -> bytes | None: ...
    def is_full(self) -> bool: ...
    def send(self, envelope: list[bytes], frames: list[bytes]) -> None: ...


class PirateSession:
    def __init__(self, bus: DurableSubscribers, counters: Counters) -> None:
        self._counters = counters
        self.totals = LoopTraffic()
        self._subscribers = bus
        self._take_put = bus.take_put
        self._verbs: dict[bytes, Callable[[Any, Identity, Callable[[Any], None]], None]] = {
            codec.HELLO: lambda request, _, then: bus.hello(request, then),
            codec.SUB: bus.subscribe,
            codec.UNSUB: lambda request, _, then: bus.unsubscribe(request, then),
            codec.PUT: bus.put,
            codec.GET: bus.get,
        }
        self.requests = dict.fromkeys(sorted(codec.OPS), 0)
        self.unanswered = 0

    def receive(self, peer: RouterPeer, frames: list[bytes]) -> None:
        key = peer.key
        only = None if key is None else fingerprint(key)
        if self._take_put(self, peer, frames, only):
            self.requests[codec.PUT] += 1
            self.unanswered += 1
            return
        end = codec.envelope_end(frames)
        if end < 0:
            self._counters.count("dropped", "pirate_no_envelope")
            return
        envelope = frames[:end]
        request = codec.parse_request(frames, end + 1)
        if isinstance(request, codec.ErrorReply):
            self._refuse(peer, envelope, request.code, request.text)
            return
        if only is not None and request.client != only:
            text = "the client's id is not the fingerprint of its key"
            self._refuse(peer, envelope, codec.DENIED, text)
            return
        if request.op == codec.GET and peer.is_full():
            self._refuse(peer, envelope, codec.BUSY, OUTBOX_FULL_TEXT)
            return
        self.requests[request.op] += 1
        self.unanswered += 1
        size = sum(map(len, request.body))
        then = partial(self.answer, peer, envelope, request.op, request.counter, size)
        self._verbs[request.op](request, peer.identity, then)

    def on_turn_end(self) -> None:
        self._subscribers.on_turn_end()

    def on_put_committed(self, size: int) -> None:
        """A message of so many bytes was put, and is being answered."""
        self.unanswered -= 1
        self.totals.received += 1
        self.totals.received_bytes += size

    def answer(
        self, peer: RouterPeer, envelope: list[bytes], op: bytes, counter: int, size: int, came: Any
    ) -> None:
        """What came of a request; `size` is that of its body."""
        if isinstance(came, int) and op == codec.PUT:
            self.on_put_committed(size)
            peer.send(envelope, codec.encode_ok(counter, came))
            return
        self.unanswered -= 1
        if isinstance(came, int):
            peer.send(envelope, codec.encode_ok(counter, came))
        elif came is None:
            peer.send(envelope, codec.encode_none())
        elif isinstance(came, PolybusError):
            self._refuse(peer, envelope, error_code(came, op), str(came))
        elif isinstance(came, HelloResult):
            peer.send(envelope, codec.encode_ok(came.epoch, came.counter))
        elif peer.is_full():  # by what was sent since it asked: many may be asked for at once
            self._refuse(peer, envelope, codec.BUSY, OUTBOX_FULL_TEXT)
        else:
            self.totals.delivered += 1
            self.totals.delivered_bytes += len(came.body)
            peer.send(envelope, codec.encode_message(came.id, came.timestamp_ns, came.body))

    def _refuse(self, peer: RouterPeer, envelope: list[bytes], code: str, text: str) -> None:
        self._counters.count("refused", f"pirate_{code.lower()}")
        peer.send(envelope, codec.encode_error(code, text))


@lru_cache(KNOWN_KEYS)
def fingerprint(key: bytes) -> bytes:
    """The id of the client that holds a CURVE key."""
    return sha256(key).digest()[:FINGERPRINT_BYTES]


_CODES: tuple[tuple[type[PolybusError], str], ...] = (
    (UnknownProducer, codec.FENCED),
    (Fenced, codec.FENCED),
    (Stale, codec.STALE),
    (Denied, codec.DENIED),
    (WrongKind, codec.DENIED),
    (MalformedRequest, codec.MALFORMED),
)


def error_code(error: PolybusError, op: bytes) -> str:
    """The word on the wire; whatever may go better another time is BUSY."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, DoesNotExist):
        return codec.NOT_SUBSCRIBED if op == codec.GET else codec.NO_TOPIC
    return codec.BUSY
