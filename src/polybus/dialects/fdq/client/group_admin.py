"""What is asked now and then: a topic's figures, and a group's position moved."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from polybus.dialects.fdq.client.time_position import check_position, to_nanoseconds
from polybus.errors import UsageError
from polybus.native import bus_client as buses

if TYPE_CHECKING:
    from polybus.native import ClientOptions

NAMED_POSITIONS = ("earliest", "latest")


def stats(url: str | None, topic: str, *, options: ClientOptions | None = None) -> dict[str, Any]:
    """A topic's counts, as a whole and by shard, and those of its groups."""
    bus = buses.connect(url, options)
    try:
        return bus.act("topic.stats", topic=topic)
    finally:
        bus.close()


def reset(
    url: str | None,
    topic: str,
    group: str = "default",
    *,
    to: str | int | datetime | Mapping[int, int],
    force: bool = False,
    options: ClientOptions | None = None,
) -> dict[str, Any]:
    """Moves a group: to "earliest", "latest", an id, a time, or offsets by shard.

    Refused while it has live consumers, unless forced: then they begin anew.
    """
    place = _position_field(to)
    bus = buses.connect(url, options)
    try:
        return bus.act("group.reset", topic=topic, group=group, to=place, force=force)
    finally:
        bus.close()


def _position_field(to: object) -> str | dict[str, Any]:
    if isinstance(to, datetime):
        return {"time_ns": to_nanoseconds("to", to)}
    if isinstance(to, Mapping):
        return {
            "offsets": {
                str(check_position("a shard", shard)): check_position("an offset", offset)
                for shard, offset in to.items()
            }
        }
    if isinstance(to, str):
        if to not in NAMED_POSITIONS:
            raise UsageError(
                f"to is {' or '.join(NAMED_POSITIONS)}, an id, a time or offsets: not {to!r}"
            )
        return to
    return {"id": check_position("to", to)}
