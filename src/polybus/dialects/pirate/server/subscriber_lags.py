"""What `topic.stats` tells of a topic's subscribers: read from the store, as all it tells."""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final

from polybus.dialects.pirate.server import subscriber_records

if TYPE_CHECKING:
    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store

MAX_LISTED: Final = 1024  # those furthest behind: who holds a topic back is among them


def read_subscriber_lags(store: Store, topic: Topic, bounds: Bounds) -> list[dict[str, Any]]:
    """Each one's id (in hex), its LAST, and how many ids it is behind; the last of all first."""
    prefix = subscriber_records.topic_prefix(subscriber_records.LASTS, topic.number)
    found = (
        (
            subscriber_records.read_last(one.value),
            subscriber_records.read_key(subscriber_records.LASTS, one.key).client.hex(),
        )
        for one in subscriber_records.scan(store, prefix)
    )
    newest = bounds.next_id - 1
    return [
        {"id": client, "last": last, "lag": max(0, newest - last)}
        for last, client in nsmallest(MAX_LISTED, found)
    ]
