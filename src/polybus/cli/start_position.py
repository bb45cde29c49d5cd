"""Start positions on the command line: earliest, latest, an id, or @TIME."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.model.start_point import EARLIEST, FORMS, LATEST, parse_start, parse_time_ns

if TYPE_CHECKING:
    from polybus.native import Client
    from polybus.native.protocol.answers import TopicBounds

__all__ = ["EARLIEST", "FORMS", "LATEST", "find_id", "parse_start", "parse_time_ns"]


def find_id(client: Client, topic: str, text: str, bounds: TopicBounds) -> int:
    """Return the id of a position in a topic that has these bounds."""
    position = parse_start(text)
    if isinstance(position, int):
        return position
    if position.startswith("@"):
        return client.find(topic, parse_time_ns(text))
    return bounds["first_id"] if position == EARLIEST else bounds["next_id"]
