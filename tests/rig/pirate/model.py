"""The answers of a pirate server, as the plainest state machine that the spec allows.

    model = Model()
    model.answer(wire.hello(b"a", 7))      # ("OK", 1, 0)

It has no store, no clock and no bound. It never removes a message that every subscriber has
read; no answer depends on that, because LAST never goes back.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.rig.pirate import wire
from tests.rig.pirate.wire import Answer

KEPT_NONCES = 1024
LEAST_FRAMES = 6


class Refused(Exception):
    """An answer that changes nothing."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.answer = wire.error(code)


@dataclass
class Client:
    epoch: int = 0
    nonces: dict[int, int] = field(default_factory=dict)  # of HELLOs → the epoch they got
    counter: int = 0
    request: tuple[bytes, ...] = ()  # the one that used the counter up
    reply: Answer = ()


@dataclass
class Topic:
    """`newest` outlives the topic: an id is given once in a name."""

    newest: int = 0
    exists: bool = False
    bodies: dict[int, bytes] = field(default_factory=dict)
    lasts: dict[bytes, int] = field(default_factory=dict)  # of its subscribers


class Model:
    def __init__(self) -> None:
        self.clients: dict[bytes, Client] = {}
        self.topics: dict[bytes, Topic] = {}

    def answer(self, frames: Sequence[bytes]) -> Answer:
        try:
            return self._answer(list(frames))
        except Refused as refused:
            return refused.answer

    def _answer(self, frames: list[bytes]) -> Answer:
        _check_form(frames)
        _, op, name, epoch, counter, topic, *own = frames
        if op == wire.PUT:
            _check_size(own)
        if op == wire.HELLO:
            return self._hello(name, wire.value(counter))
        client = self.clients.get(name)
        if client is None or client.epoch != wire.value(epoch):
            raise Refused("FENCED")
        if op == wire.GET:
            return self._get(name, topic, wire.value(own[0]))
        return self._once(client, wire.value(counter), (op, topic, b"".join(own)), name)

    def _hello(self, name: bytes, nonce: int) -> Answer:
        client = self.clients.setdefault(name, Client())
        if nonce not in client.nonces:
            client.epoch += 1
            client.nonces[nonce] = client.epoch
            if len(client.nonces) > KEPT_NONCES:
                del client.nonces[next(iter(client.nonces))]
        return ("OK", client.nonces[nonce], client.counter)

    def _once(
        self, client: Client, counter: int, request: tuple[bytes, ...], name: bytes
    ) -> Answer:
        if counter == client.counter and request == client.request:
            return client.reply
        if counter <= client.counter:
            raise Refused("STALE")
        reply = self._do(name, counter, *request)
        client.counter, client.request, client.reply = counter, request, reply
        return reply

    def _do(self, name: bytes, counter: int, op: bytes, topic: bytes, body: bytes) -> Answer:
        if op == wire.SUB:
            return ("OK", counter, self._subscribe(name, topic))
        if op == wire.UNSUB:
            return ("OK", counter, self._unsubscribe(name, topic))
        found = self.topics.get(topic)
        if found is None or not found.exists:
            return wire.error("NO_TOPIC")
        found.newest += 1
        found.bodies[found.newest] = body
        return ("OK", counter, found.newest)

    def _subscribe(self, name: bytes, topic: bytes) -> int:
        found = self.topics.setdefault(topic, Topic())
        found.exists = True
        return found.lasts.setdefault(name, found.newest)

    def _unsubscribe(self, name: bytes, topic: bytes) -> int:
        found = self.topics.get(topic)
        if found is None or name not in found.lasts:
            return 0
        del found.lasts[name]
        if not found.lasts:
            found.exists = False
            found.bodies.clear()
        return 1

    def _get(self, name: bytes, topic: bytes, last: int) -> Answer:
        found = self.topics.get(topic)
        if found is None or name not in found.lasts:
            raise Refused("NOT_SUBSCRIBED")
        if last > found.newest:
            raise Refused("MALFORMED")
        last = found.lasts[name] = max(found.lasts[name], last)
        if last == found.newest:
            return wire.NONE
        return ("MSG", last + 1, found.bodies[last + 1])


def _check_form(frames: list[bytes]) -> None:
    if len(frames) < LEAST_FRAMES or frames[0] != wire.VERSION:
        raise Refused("MALFORMED")
    _, op, name, epoch, counter, topic, *own = frames
    checks = {
        wire.HELLO: lambda: wire.value(epoch) == 0 and not topic and not own,
        wire.SUB: lambda: not own,
        wire.UNSUB: lambda: not own,
        wire.PUT: lambda: len(own) > 0,
        wire.GET: lambda: [len(frame) for frame in own] == [8],
    }
    if op not in checks or not 1 <= len(name) <= 64 or len(epoch) != 8:
        raise Refused("MALFORMED")
    if op != wire.GET and len(counter) != 8:
        raise Refused("MALFORMED")
    if op in wire.COUNTED and wire.value(counter) == 0:
        raise Refused("MALFORMED")
    if not checks[op]() or (op != wire.HELLO and not _is_name(topic)):
        raise Refused("MALFORMED")


def _is_name(topic: bytes) -> bool:
    if not 1 <= len(topic) <= 255 or topic.startswith(b"_"):
        return False
    try:
        text = topic.decode()
    except UnicodeDecodeError:
        return False
    return not any(one in ",*" or unicodedata.category(one) == "Cc" for one in text)


def _check_size(body: list[bytes]) -> None:
    if any(len(frame) > wire.MAX_FRAME for frame in body) or sum(map(len, body)) > wire.MAX_BODY:
        raise Refused("TOO_LARGE")
