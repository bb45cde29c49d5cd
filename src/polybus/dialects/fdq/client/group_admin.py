"""Administration: statistics and shards of a topic, and moving a group to another position."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from polybus.dialects.fdq.client.topic_replay import check_position, to_nanoseconds
from polybus.errors import UsageError
from polybus.native import bus_client as buses
from polybus.native.protocol.requests import GroupReset

if TYPE_CHECKING:
    from polybus.native import ClientOptions

NAMED_POSITIONS = ("earliest", "latest")


def stats(url: str | None, topic: str, *, options: ClientOptions | None = None) -> dict[str, Any]:
    """Return the counts of a topic, in total and by shard, and those of its groups."""
    bus = buses.connect(url, options)
    try:
        return dict(bus.topic_stats(topic))
    finally:
        bus.close()


def reshard(
    url: str | None, topic: str, shards: int, *, options: ClientOptions | None = None
) -> dict[str, Any]:
    """Change the number of shards of a topic, while it is in use. Returns its description.

    Messages of a key keep their order. Raises `Conflict` while a group still drains the shards
    that the last reshard has sealed.
    """
    bus = buses.connect(url, options)
    try:
        return dict(bus.reshard(topic, shards))
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
    """Move a group to "earliest", "latest", an id, a time, or offsets by shard.

    Raises `Conflict` while the group has live consumers. With `force` they start again from
    the new position.
    """
    position: str | dict[str, Any]
    if isinstance(to, datetime):
        position = {"time_ns": to_nanoseconds("to", to)}
    elif isinstance(to, Mapping):
        offsets = {
            str(check_position("shard", shard)): check_position("offset", offset)
            for shard, offset in to.items()
        }
        position = {"offsets": offsets}
    elif isinstance(to, str):
        if to not in NAMED_POSITIONS:
            raise UsageError(
                f"to must be {', '.join(NAMED_POSITIONS)}, an id, a time or offsets, got {to!r}"
            )
        position = to
    else:
        position = {"id": check_position("to", to)}
    bus = buses.connect(url, options)
    try:
        request = GroupReset(topic=topic, group=group, to=position, force=force)
        return dict(bus.call(request))
    finally:
        bus.close()
