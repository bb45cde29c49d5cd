"""Where unread messages of ephemeral topics are kept: chunks shared by all readers.

A chunk is three columns (bodies, where each ends, when each came) that only
grow at the end. Readers hold ranges of chunks, so a message is stored once
however many readers it has, and is freed with the last range that covers it.
A batch from a pipelining producer becomes a chunk of its own as it is; single
messages are gathered into one chunk of moderate size, so that a small message
costs a few bytes and not a few objects.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Buffer

GATHERED_BYTES = 64 * 1024  # past this a new chunk is begun: what is read can be freed soon
GATHERED_MESSAGES = 4096
BESIDE_BYTES = 12  # of each message: where it ends, and its time
# A reader that has read all but this part of a large chunk keeps a copy of the rest
# alone: what it holds of the bus's memory is in proportion to what it is charged for.
SMALL_REST = 4
WORTH_A_CHUNK = 64  # a batch of this many messages is kept as it came


class Chunk:
    """Messages `first_id`, `first_id` + 1, …; `notice` if it is a deletion notice."""

    __slots__ = ("bodies", "first_id", "notice", "offsets", "times")

    def __init__(self, first_id: int, *, notice: bool = False) -> None:
        self.first_id = first_id
        self.notice = notice
        self.bodies: bytes | bytearray = bytearray()
        self.offsets: array[int] = array("i", [0])
        self.times: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self.times)

    @classmethod
    def of_batch(cls, first_id: int, offsets: Buffer, bodies: bytes, timestamp_ns: int) -> Chunk:
        chunk = cls(first_id)
        chunk.bodies = bodies
        chunk.offsets = array("i")
        chunk.offsets.frombytes(offsets)
        chunk.times = array("Q", [timestamp_ns]) * (len(chunk.offsets) - 1)
        return chunk

    @classmethod
    def of_notice(cls, message_id: int, body: bytes, timestamp_ns: int) -> Chunk:
        chunk = cls(message_id, notice=True)
        chunk.append(body, timestamp_ns)
        return chunk

    def append(self, body: bytes | memoryview, timestamp_ns: int) -> None:
        self.bodies += body
        self.offsets.append(len(self.bodies))
        self.times.append(timestamp_ns)

    def body_bytes(self, start: int, end: int) -> int:
        return self.offsets[end] - self.offsets[start]

    def weight(self, start: int, end: int) -> int:
        """What these messages take up here."""
        return self.body_bytes(start, end) + BESIDE_BYTES * (end - start)

    def part(self, start: int, end: int) -> Chunk:
        """These messages in a chunk of their own, which takes no more."""
        base, after = self.offsets[start], self.offsets[end]
        part = Chunk(self.first_id + start, notice=self.notice)
        part.bodies = bytes(memoryview(self.bodies)[base:after])
        part.offsets = array("i", [place - base for place in self.offsets[start : end + 1]])
        part.times = self.times[start:end]
        return part

    @property
    def is_open(self) -> bool:
        """May more single messages be gathered here?"""
        return (
            isinstance(self.bodies, bytearray)
            and not self.notice
            and len(self.bodies) < GATHERED_BYTES
            and len(self.times) < GATHERED_MESSAGES
        )


class Range:
    """Messages start to end of a chunk, by place in the chunk."""

    __slots__ = ("chunk", "end", "start")

    def __init__(self, chunk: Chunk, start: int, end: int) -> None:
        self.chunk = chunk
        self.start = start
        self.end = end

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def size(self) -> int:
        return self.chunk.body_bytes(self.start, self.end)

    @property
    def first_id(self) -> int:
        return self.chunk.first_id + self.start

    def shrink(self) -> None:
        """Lets go of a large chunk of which this is but a small part."""
        chunk = self.chunk
        whole = chunk.weight(0, len(chunk))
        if whole > GATHERED_BYTES and SMALL_REST * chunk.weight(self.start, self.end) < whole:
            self.chunk = chunk.part(self.start, self.end)
            self.start, self.end = 0, len(self.chunk)

    def extend(self, more: Range) -> bool:
        """Takes in the messages right behind its own; False if these are others."""
        if more.chunk is not self.chunk or more.start != self.end:
            return False
        self.end = more.end
        return True


class Fitting(NamedTuple):
    """What of a range there is room for: the runs that fit, and how many do not, and why."""

    runs: list[Range]
    too_large: int
    too_many: int


def fitting(found: Range, room_bytes: int, room_messages: int) -> Fitting:
    """One by one: a message fits if what fitted before it has left room for it."""
    runs: list[Range] = []
    too_large = 0
    offsets = found.chunk.offsets
    for place in range(found.start, found.end):
        size = offsets[place + 1] - offsets[place]
        if room_messages <= 0:
            return Fitting(runs, too_large, found.end - place)
        if size > room_bytes:
            too_large += 1
            continue
        room_bytes -= size
        room_messages -= 1
        if runs and runs[-1].end == place:
            runs[-1].end += 1
        else:
            runs.append(Range(found.chunk, place, place + 1))
    return Fitting(runs, too_large, 0)


class Writer:
    """Turns batches that come in into ranges, for one incarnation of a topic."""

    def __init__(self) -> None:
        self._open = Chunk(0)
        self._last_ns = 0

    def time(self, now_ns: int) -> int:
        """Timestamps of a topic never go back."""
        self._last_ns = max(self._last_ns, now_ns)
        return self._last_ns

    def write(self, first_id: int, offsets: Buffer, bodies: bytes, now_ns: int) -> Range:
        ends = memoryview(offsets).cast("B").cast("i")
        count = len(ends) - 1
        stamp = self.time(now_ns)
        if count >= WORTH_A_CHUNK or len(bodies) >= GATHERED_BYTES:
            return Range(Chunk.of_batch(first_id, offsets, bodies, stamp), 0, count)
        return self._gather(first_id, ends, memoryview(bodies), stamp)

    def _gather(self, first_id: int, ends: memoryview, bodies: memoryview, stamp: int) -> Range:
        chunk = self._open
        if not chunk.is_open or chunk.first_id + len(chunk) != first_id:
            chunk = self._open = Chunk(first_id)
        start = len(chunk)
        for place in range(len(ends) - 1):
            chunk.append(bodies[ends[place] : ends[place + 1]], stamp)
        return Range(chunk, start, len(chunk))
