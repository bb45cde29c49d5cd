"""What a benchmark needs to know of a server: how to start it, and how its wire looks.

A wire is pure: it turns topics and contents into the exact bytes that a publisher sends and that a
subscriber must receive. The load generator knows nothing else.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from bench.harness.load import Hello


class Wire(Protocol):
    """The bytes of one protocol."""

    @property
    def aside(self) -> bytes:
        """What the server may say between messages; empty for most."""

    def publish(self, topic: bytes, content: bytes) -> bytes:
        """One message as its publisher sends it."""

    def deliver(self, topic: bytes, number: int, content: bytes) -> bytes:
        """The same message as a subscriber gets it; `number` is the topic's place in its list."""

    def subscriber(self, topics: Sequence[bytes]) -> Hello:
        """Opens a connection that gets these topics."""

    def publisher(self, subscriptions: Sequence[Sequence[bytes]], publishers: int) -> Hello:
        """Opens one of so many publishers' connections; these subscribers are there already."""


@dataclass(frozen=True)
class Running:
    """A server that is up, with the ports for each role (most have one for both)."""

    pid: int | None
    publish_port: int
    subscribe_port: int
    version: str
    cpus: frozenset[int] = frozenset()  # that it was pinned to; empty: those of the harness


class Peer(Protocol):
    """A server that can be started."""

    @property
    def name(self) -> str:
        """As it stands in tables."""

    @property
    def wire(self) -> Wire:
        """How it speaks."""

    @property
    def selects_topics(self) -> bool:
        """Whether it can send a subscriber some topics only; the raw relay sends all of them."""

    def start(self) -> AbstractContextManager[Running]:
        """Starts it on free loopback ports; leaving the block stops it."""
