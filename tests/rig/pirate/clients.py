"""Clients as processes that may be killed. Each life has a diary of its own.

    work     does this and that until SIGTERM, and ends
    drain    reads all there is, and ends

A life begins by saying what became of the last counted request of the life before: its
state folder knows.
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
from tests.rig.pirate.random_client import Sailor

WOKE: Final = "woke"


@dataclass(frozen=True)
class Orders:
    """`name` is the life's, `client` whose life it is."""

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
    def diary(self) -> Path:
        return Path(self.folder, f"{self.name}.diary")

    @property
    def log(self) -> Path:
        return Path(self.folder, f"{self.name}.log")


def work(orders: Orders) -> None:
    ending = Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    sailor, talker = _begin(orders)
    while not ending.is_set():
        sailor.step()
    talker.close()


def drain(orders: Orders) -> None:
    sailor, talker = _begin(orders)
    sailor.drain()
    talker.close()


def _begin(orders: Orders) -> tuple[Sailor, Ours]:
    die_with_parent()
    sys.stderr = orders.log.open("w")
    order = Order.RECORD_THEN_DELIVER if orders.records_first else Order.DELIVER_THEN_RECORD
    diary = Journal(orders.diary)
    talker = Ours(orders.endpoint, orders.state, order)
    diary.note(WOKE, topic="", **talker.wake())
    subscribed = talker.client.subscriptions
    sailor = Sailor(orders.name, talker, diary, orders.seed, TOPICS, subscribed=sorted(subscribed))
    return sailor, talker
