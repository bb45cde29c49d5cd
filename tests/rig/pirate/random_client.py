"""Clients that put, get, subscribe and unsubscribe at random, and record the answers.

Each keeps a journal (`tests.rig.fdq.journal`) of its requests and their outcomes. It sends
them through a `RequestClient`: plain pyzmq (`zmq_client.py`) or our client (`polybus_client.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final, Protocol

from tests.rig.fdq.journal import Journal
from tests.rig.pirate.wire import NONE, Answer

PUT, GET, SUB, UNSUB = "put", "get", "sub", "unsub"
DRAINED: Final = "drained"  # the topic was empty after all writers had ended
OK: Final = "ok"
UNSENT: Final = "UNSENT"  # killed before it was in the journal, so it was never sent

MIX: Final = {PUT: 10, GET: 14, SUB: 2, UNSUB: 1}
LARGE_ODDS: Final = 0.01
MOST_PADDING: Final = 3 << 20  # some bodies take several frames


class RequestClient(Protocol):
    """Every call returns an answer of the server, however long that takes."""

    def put(self, topic: str, body: bytes, /) -> Answer: ...
    def get(self, topic: str, /) -> Answer: ...
    def sub(self, topic: str, /) -> Answer: ...
    def unsub(self, topic: str, /) -> Answer: ...

    def delivered(self) -> None:
        """Record the last message of `get` as read. The journal of the test has it already."""
        ...

    def mark(self) -> dict[str, Any]:
        """Return the fields that show, after a kill, whether the next counted request was done."""
        ...


def body_of(label: str, padding: int) -> bytes:
    return label.encode() + bytes(padding)


def describe_body(body: bytes) -> str:
    """Return the label and the padding, from which the body can be made again."""
    label = body.rstrip(b"\0")
    return f"{label.decode()} +{len(body) - len(label)}"


class RandomClient:
    """One client. `subscribed` lists its subscriptions at the start."""

    def __init__(
        self,
        name: str,
        client: RequestClient,
        journal: Journal,
        seed: int,
        topics: Sequence[str],
        *,
        subscribed: Sequence[str] = (),
        mix: Mapping[str, int] = MIX,
    ) -> None:
        self._name, self._client, self._journal = name, client, journal
        self._random = Random(seed)
        self._topics = list(topics)
        self._subscribed = set(subscribed)
        self._kinds, self._weights = list(mix), list(mix.values())
        self._sent = 0

    def step(self) -> None:
        kind = self._random.choices(self._kinds, self._weights)[0]
        topic = self._random.choice(self._topics)
        if kind == PUT:
            self._put(topic)
        elif kind == SUB or not self._subscribed:
            self._sub(topic)
        elif kind == UNSUB:
            self._unsub(self._random.choice(sorted(self._subscribed)))
        else:
            self.get(self._random.choice(sorted(self._subscribed)))

    def drain(self) -> None:
        """Read all messages after the last PUT."""
        for topic in sorted(self._subscribed):
            while self.get(topic) != NONE:
                pass
            self._journal.note(DRAINED, topic=topic)

    def get(self, topic: str) -> Answer:
        number = self._journal.begin(GET, topic=topic)
        answer = self._client.get(topic)
        word, *rest = answer
        if word == "MSG":
            identity, body = rest
            assert isinstance(body, bytes)
            self._journal.end(number, OK, id=identity, body=describe_body(body))
            self._client.delivered()
        else:
            self._journal.end(number, str(rest[0]) if rest else str(word))
        return answer

    def _put(self, topic: str) -> None:
        self._sent += 1
        large = self._random.random() < LARGE_ODDS
        body = body_of(f"{self._name} {self._sent}", self._random.randrange(MOST_PADDING) * large)
        number = self._journal.begin(
            PUT, topic=topic, body=describe_body(body), **self._client.mark()
        )
        self._end(number, self._client.put(topic, body))

    def _sub(self, topic: str) -> None:
        number = self._journal.begin(SUB, topic=topic, **self._client.mark())
        if self._end(number, self._client.sub(topic)):
            self._subscribed.add(topic)

    def _unsub(self, topic: str) -> None:
        number = self._journal.begin(UNSUB, topic=topic, **self._client.mark())
        if self._end(number, self._client.unsub(topic)):
            self._subscribed.discard(topic)

    def _end(self, number: int, answer: Answer) -> bool:
        word, *rest = answer
        if word == "OK":
            self._journal.end(number, OK, value=rest[-1])
        else:
            self._journal.end(number, str(rest[0]))
        return word == "OK"
