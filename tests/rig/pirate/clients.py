"""Clients as processes that may be killed. Each process of a client has its own journal.

    work     makes random requests until SIGTERM
    drain    reads all messages, and ends

A process first notes the outcome of the last counted request of the process before it, which
its state folder has.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

from polybus.dialects.pirate.client.pirate_options import Order
from tests.rig.fdq.journal import Journal
from tests.rig.fork_server import die_with_parent
from tests.rig.pirate.lossy_round import TOPICS
from tests.rig.pirate.polybus_client import Ours
from tests.rig.pirate.random_client import RandomClient

WOKE: Final = "woke"


@dataclass(frozen=True)
class Orders:
    """`name` is the name of the process, `client` that of its client."""

    endpoint: str
    name: str
    client: str
    folder: str
    seed: int = 0
    records_first: bool = True

    @property
    def state(self) -> Path:
        return Path(self.folder, self.client)

    @property
    def journal(self) -> Path:
        return Path(self.folder, f"{self.name}.journal")

    @property
    def log(self) -> Path:
        return Path(self.folder, f"{self.name}.log")


def work(orders: Orders) -> None:
    ending = Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    random_client, client = _begin(orders)
    while not ending.is_set():
        random_client.step()
    client.close()


def drain(orders: Orders) -> None:
    random_client, client = _begin(orders)
    random_client.drain()
    client.close()


def _begin(orders: Orders) -> tuple[RandomClient, Ours]:
    die_with_parent()
    sys.stderr = orders.log.open("w")
    order = Order.RECORD_THEN_DELIVER if orders.records_first else Order.DELIVER_THEN_RECORD
    journal = Journal(orders.journal)
    client = Ours(orders.endpoint, orders.state, order)
    journal.note(WOKE, topic="", **client.wake())
    subscribed = client.client.subscriptions
    random_client = RandomClient(
        orders.name, client, journal, orders.seed, TOPICS, subscribed=sorted(subscribed)
    )
    return random_client, client
