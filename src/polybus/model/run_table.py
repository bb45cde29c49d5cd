"""Run tables: the ids and times of the messages of a block.

A run is a sequence of messages with consecutive ids and one time, usually those of one
commit. A table is the bytes of its runs, each three little-endian int64: first id,
timestamp in ns, count. The place of a message is its index in the block. Ids and times
never decrease along a table, and a join extends the last run if possible.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

from typing_extensions import Buffer

from polybus.errors import Damaged

RUN_BYTES = 24
_RUN = struct.Struct("<qqq")


class IdRun(NamedTuple):
    first_id: int
    timestamp_ns: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used


def make_table(first_id: int, timestamp_ns: int, count: int) -> bytes:
    """Return the table of one run."""
    return _RUN.pack(first_id, timestamp_ns, count)


def read_runs(runs: Buffer) -> list[IdRun]:
    return [IdRun(*fields) for fields in _RUN.iter_unpack(_checked(runs))]


def count_messages(runs: Buffer) -> int:
    """Return the number of messages."""
    return sum(_numbers(runs)[2::3])


def join_tables(*tables: Buffer) -> bytes:
    """Join tables in order; a run that continues the previous one is merged with it."""
    joined = bytearray()
    for table in tables:
        added = bytes(_checked(table))
        if joined and added:
            last_at = len(joined) - RUN_BYTES
            last = IdRun(*_RUN.unpack_from(joined, last_at))
            first = IdRun(*_RUN.unpack_from(added))
            if first == (last.first_id + last.count, last.timestamp_ns, first.count):
                last = last._replace(count=last.count + first.count)
                _RUN.pack_into(joined, last_at, *last)
                added = added[RUN_BYTES:]
        joined += added
    return bytes(joined)


def cut_runs(runs: Buffer, start: int, end: int) -> bytes:
    """Return the table of places `start` to `end` (exclusive). Raises IndexError."""
    ends = _ends(runs)
    if not ends or not 0 <= start <= end <= ends[-1]:
        raise IndexError(f"places {start} to {end} of {ends[-1] if ends else 0}")
    if start == end:
        return b""
    first, last = bisect_right(ends, start), bisect_left(ends, end)
    kept = bytearray(_checked(runs)[first * RUN_BYTES : (last + 1) * RUN_BYTES])
    # The last run before the first: both may be the same run.
    last_at = len(kept) - RUN_BYTES
    first_id, time, count = _RUN.unpack_from(kept, last_at)
    _RUN.pack_into(kept, last_at, first_id, time, count - (ends[last] - end))
    skipped = start - (ends[first - 1] if first else 0)
    first_id, time, count = _RUN.unpack_from(kept)
    _RUN.pack_into(kept, 0, first_id + skipped, time, count - skipped)
    return bytes(kept)


def last_id(runs: Buffer) -> int:
    """Return the id of the last message. Raises IndexError if there is none."""
    view = _checked(runs)
    if not view:
        raise IndexError("the last id of no messages")
    run = IdRun(*_RUN.unpack_from(view, len(view) - RUN_BYTES))
    return run.first_id + run.count - 1


def id_at(runs: Buffer, place: int) -> int:
    run, inside = _find(runs, place)
    return run.first_id + inside


def time_at(runs: Buffer, place: int) -> int:
    return _find(runs, place)[0].timestamp_ns


def place_of_id(runs: Buffer, wanted: int) -> int:
    """Return the first place with an id >= this, or the count if there is none."""
    numbers = _numbers(runs)
    first_ids = numbers[0::3]
    at = bisect_right(first_ids, wanted) - 1
    if at < 0:
        return 0
    before = sum(numbers[2 : at * 3 : 3])
    return before + min(wanted - first_ids[at], numbers[at * 3 + 2])


def place_of_time(runs: Buffer, timestamp_ns: int) -> int:
    """Return the first place with a time >= this, or the count if there is none."""
    numbers = _numbers(runs)
    at = bisect_left(numbers[1::3], timestamp_ns)
    return sum(numbers[2 : at * 3 : 3])


def _checked(runs: Buffer) -> memoryview:
    view = memoryview(runs).cast("B")
    if len(view) % RUN_BYTES:
        raise Damaged(f"run table must have a multiple of {RUN_BYTES} bytes, got {len(view)}")
    return view


def _numbers(runs: Buffer) -> array[int]:
    return array("q", bytes(_checked(runs)))


def _ends(runs: Buffer) -> list[int]:
    """Return the place after each run."""
    return list(accumulate(_numbers(runs)[2::3]))


def _find(runs: Buffer, place: int) -> tuple[IdRun, int]:
    ends = _ends(runs)
    if not ends or not 0 <= place < ends[-1]:
        raise IndexError(f"place {place} of {ends[-1] if ends else 0}")
    number = bisect_right(ends, place)
    run = IdRun(*_RUN.unpack_from(_checked(runs), number * RUN_BYTES))
    return run, place - (ends[number] - run.count)
