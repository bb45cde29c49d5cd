"""Which unread messages fit into a limit (unread_queue.pyx stores them)."""

from __future__ import annotations

from typing import NamedTuple

from polybus.dialects.freud.server.unread_queue import Range


class FittingRanges(NamedTuple):
    """What of a range there is room for: the runs that fit, and how many do not, and why."""

    runs: list[Range]
    too_large: int
    too_many: int


def copy_range(run: Range) -> Range:
    """A copy: a run of a batch that did not fit whole must not keep the rest of it alive.

    What a reader holds of the bus's memory is in proportion to what it is charged for.
    """
    own = run.chunk.part(run.start, run.end)
    return Range(own, 0, len(own))


def find_fitting(found: Range, room_bytes: int, room_messages: int) -> FittingRanges:
    """One by one: a message fits if what fitted before it has left room for it."""
    runs: list[Range] = []
    too_large = 0
    for place, size in enumerate(found.sizes(), found.start):
        if room_messages <= 0:
            return FittingRanges(runs, too_large, found.end - place)
        if size > room_bytes:
            too_large += 1
            continue
        room_bytes -= size
        room_messages -= 1
        if runs and runs[-1].end == place:
            runs[-1].end += 1
        else:
            runs.append(Range(found.chunk, place, place + 1))
    return FittingRanges(runs, too_large, 0)
