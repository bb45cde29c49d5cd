"""A batch under construction, and the engine's cache of heads.

Two rules make several buses on one stream safe:

- Every head that a decision rests on is also written by the batch, with the sequence
  it was read at. So a decision that was overtaken is refused by the server.
- A cached head may lead to a batch, never to an answer. The engine returns a refusal, or
  the first result of a repeated stamp, only after it has read all heads again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.spikes.jetstream.link import Link, Outgoing, Stored
from tests.spikes.jetstream.senses import Senses

ROLLUP = {"Nats-Rollup": "sub"}
GONE = {"Polybus-Gone": "1", "Nats-TTL": "1h"}  # after that "no message" means the same


class Head(NamedTuple):
    """The last message of a subject; sequence 0 if there is none, body None if it is gone."""

    sequence: int
    body: bytes | None

    def json(self) -> Any:
        return None if self.body is None else json.loads(self.body)


class Heads:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[str, Head] = {}

    def get(self, subject: str) -> tuple[Head, bool]:
        """The head, and whether it was read just now."""
        if subject in self._known:
            return self._known[subject], False
        head = self._known[subject] = head_of(self._link.last(subject))
        return head, True

    def learn(self, subject: str, head: Head) -> None:
        self._known[subject] = head

    def forget(self, subjects: Iterable[str]) -> None:
        for subject in subjects:
            self._known.pop(subject, None)


def head_of(stored: Stored | None) -> Head:
    if stored is None:
        return Head(0, None)
    return Head(stored.sequence, None if "Polybus-Gone" in stored.headers else stored.body)


class Draft:
    def __init__(self, heads: Heads, senses: Senses) -> None:
        self._heads = heads
        self.senses = senses
        self._read: dict[str, Head] = {}
        self.messages: list[Outgoing] = []
        self.fresh = True

    def head(self, subject: str) -> Head:
        if subject not in self._read:
            self._read[subject], fresh = self._heads.get(subject)
            self.fresh = self.fresh and fresh
        return self._read[subject]

    def add(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        """Append a message to its subject."""
        self.messages.append(Outgoing(subject, body, headers))

    def set(self, subject: str, body: bytes | None) -> None:
        """Replace a head. If the batch has read the old one, that must still be the last one."""
        read = self._read.get(subject)
        headers = ROLLUP if body is not None else ROLLUP | GONE
        after = None if read is None else read.sequence
        self.messages.append(Outgoing(subject, body or b"", headers, after))

    def set_json(self, subject: str, value: object) -> None:
        self.set(subject, json.dumps(value).encode())

    def forget(self) -> None:
        self._heads.forget(self._read)

    def sent(self, last_sequence: int) -> dict[str, int]:
        """Learns the new heads; the sequence of the last message of each subject."""
        first = last_sequence - len(self.messages) + 1
        sequences = {out.subject: first + at for at, out in enumerate(self.messages)}
        for out in self.messages:
            if "Nats-Rollup" in out.headers:
                gone = "Polybus-Gone" in out.headers
                head = Head(sequences[out.subject], None if gone else out.body)
                self._heads.learn(out.subject, head)
                self.senses.saw(out.subject, head.sequence)
        return sequences
