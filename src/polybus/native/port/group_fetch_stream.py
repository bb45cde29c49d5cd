"""`group.fetch`: rows for a member of a group, once or for as long as it goes on.

A member that follows is told of rows as they are committed, without asking for each:
that would take longer than to write them. It goes on until as many rows were given as it
has asked for, its time is up, or something else than rows is to be told: that is the last
it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.groups.member_fetch import EMPTY_FETCH
from polybus.native.port.group_actions import GROUP_CHANGES, get_group_topic
from polybus.native.port.group_entries import read_held

if TYPE_CHECKING:
    from polybus.groups.member_fetch import FetchResult
    from polybus.model.rows import Rows
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.protocol.fields import Answer, Arguments

FetchPart = tuple["Answer | None", "Rows"]  # without an answer there is nothing but rows


def stream_fetch(port: NativePort, caller: Caller, given: Arguments) -> Iterator[FetchPart]:
    """One answer with its rows, or as many as there are to be followed."""
    topic = get_group_topic(port, caller, given)
    held = read_held(given["held"] or [])
    limits = port.limits
    most = (
        min(given["max_rows"], limits.max_fetch_rows),
        min(given["max_bytes"], limits.max_fetch_bytes),
    )
    member = given["consumer"], given["epoch"]
    wait_s = min(given["wait_ms"] / 1000, limits.max_wait_s)
    fetching = port.groups.open_fetch(topic, given["group"], member, held, most, not wait_s)
    found = fetching.poll()
    if found or not wait_s:
        yield _fetch_part(port, found, given)
        if found.is_change or not (given["follow"] and fetching.advance(found)):
            return
    wanted = [shard for shard, one in held.items() if not one.paused]
    places = [(topic.number, shard) for shard in (GROUP_CHANGES, *wanted)]
    with port.waits.open_wait(places, wait_s, caller.is_gone) as waiting:
        found = fetching.poll()
        while True:
            while not found and waiting.sleep():
                found = fetching.poll()
            get_group_topic(port, caller, given)  # the rules may be others by now
            yield _fetch_part(port, found, given)
            if found.is_change or not (found and given["follow"] and fetching.advance(found)):
                return
            found = EMPTY_FETCH  # until there are news: those since the last look wake at once


def _fetch_part(port: NativePort, found: FetchResult, given: Arguments) -> FetchPart:
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
