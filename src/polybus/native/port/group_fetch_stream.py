"""`group.fetch`: rows for a member of a group, once or for as long as it goes on.

A member that follows is told of rows as they are committed, without asking for each:
that would take longer than to write them. It goes on until as many rows were given as it
has asked for, its time is up, or something else than rows is to be told: that is the last
it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.groups.member_fetch import NOTHING
from polybus.native.port.group_actions import ANY_GROUP_OF, topic_of
from polybus.native.port.group_entries import read_held

if TYPE_CHECKING:
    from polybus.groups.member_fetch import Fetched
    from polybus.model.rows import Rows
    from polybus.native.port.native_port import Caller, Port
    from polybus.native.protocol.fields import Answer, Arguments

Told = tuple["Answer | None", "Rows"]  # without an answer there is nothing but rows


def follow(port: Port, caller: Caller, given: Arguments) -> Iterator[Told]:
    """One answer with its rows, or as many as there are to be followed."""
    topic = topic_of(port, caller, given)
    held = read_held(given["held"] or [])
    limits = port.limits
    most = (
        min(given["max_rows"], limits.max_fetch_rows),
        min(given["max_bytes"], limits.max_fetch_bytes),
    )
    member = given["consumer"], given["epoch"]
    wait_s = min(given["wait_ms"] / 1000, limits.max_wait_s)
    fetching = port.groups.fetching(topic, given["group"], member, held, most, not wait_s)
    found = fetching.look()
    if found or not wait_s:
        yield _told(port, found, given)
        if found.is_change or not (given["follow"] and fetching.go_on(found)):
            return
    wanted = [shard for shard, one in held.items() if not one.paused]
    places = [(topic.number, shard) for shard in (ANY_GROUP_OF, *wanted)]
    with port.waits.waiting(places, wait_s, caller.is_gone) as waiting:
        found = fetching.look()
        while True:
            while not found and waiting.sleep():
                found = fetching.look()
            topic_of(port, caller, given)  # the rules may be others by now
            yield _told(port, found, given)
            if found.is_change or not (found and given["follow"] and fetching.go_on(found)):
                return
            found = NOTHING  # until there are news: those since the last look wake at once


def _told(port: Port, found: Fetched, given: Arguments) -> Told:
    rows = found.rows
    if rows.count:
        port.access.durable.traffic.deliver(rows.count, rows.size_bytes)
        if given["follow"] and not found.is_change:
            return None, rows
    answer = {
        "assigned": found.assigned,
        "release": found.release,
        "lost": found.lost,
        "rows": found.places,
    }
    return answer, rows
