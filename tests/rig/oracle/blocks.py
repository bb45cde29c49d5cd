"""Oracle of kernel/blocks and kernel/block_gather, written from docs/spec/block.md.

A block is a list of messages here. `encode` writes one, `decode` reads one and
raises `Bad` with the stable reason; `gather` picks and orders messages one by one.
The checksum is PyPI's xxhash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import xxhash

MAGIC = bytes.fromhex("8950424C4F434B0A")
HEADER = struct.Struct("<8sQHHIIIIIII")
MAX_BYTES = 256 << 20
KEYS, NULL_KEYS, HEADERS, NULL_HEADERS = 1, 2, 4, 8

Pairs = tuple[tuple[bytes, bytes], ...]


class Bad(Exception):
    """The bytes are not a block; the text is the stable reason."""


@dataclass(frozen=True)
class Message:
    """`key` and names are UTF-8, as bytes."""

    insertion_ms: int
    body: bytes
    key: bytes | None = None
    headers: Pairs | None = None


# --- writing ------------------------------------------------------------------


def encode(messages: Sequence[Message]) -> bytes:
    """The one block of these messages."""
    keys = [message.key for message in messages]
    headers = [message.headers for message in messages]
    flags = flags_of(keys, KEYS, NULL_KEYS) | flags_of(headers, HEADERS, NULL_HEADERS)
    columns = [
        struct.pack(f"<{len(messages)}q", *(message.insertion_ms for message in messages)),
        *strings([message.body for message in messages]),
    ]
    if flags & NULL_KEYS:
        columns.append(bitmap(keys))
    if flags & KEYS:
        columns += strings([key or b"" for key in keys])
    if flags & NULL_HEADERS:
        columns.append(bitmap(headers))
    pairs = [pair for one in headers for pair in one or ()]
    if flags & HEADERS:
        columns.append(cuts([len(one or ()) for one in headers]))
        columns += strings([name for name, _ in pairs])
        columns += strings([value for _, value in pairs])
    sizes = (
        sum(len(message.body) for message in messages),
        sum(len(key or b"") for key in keys),
        len(pairs),
        sum(len(name) for name, _ in pairs),
        sum(len(value) for _, value in pairs),
    )
    return seal(flags, len(messages), sizes, b"".join(padded(column) for column in columns))


def seal(flags: int, count: int, sizes: tuple[int, ...], columns: bytes, version: int = 1) -> bytes:
    """A header before columns that are padded already, with the right checksum."""
    size = HEADER.size + len(columns)
    header = HEADER.pack(MAGIC, 0, version, flags, count, size, *sizes)
    return resealed(header + columns)


def resealed(block: bytes) -> bytes:
    """The same bytes with the checksum that they should have."""
    return block[:8] + struct.pack("<Q", xxhash.xxh64_intdigest(block[16:])) + block[16:]


def padded(column: bytes) -> bytes:
    return column + bytes(-len(column) % 8)


def cuts(sizes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sizes) + 1}i", *accumulate(sizes, initial=0))


def strings(values: Sequence[bytes]) -> list[bytes]:
    return [cuts([len(value) for value in values]), b"".join(values)]


def bitmap(values: Sequence[object | None]) -> bytes:
    bits = [value is not None for value in values] + [False] * (-len(values) % 8)
    octets = [bits[at : at + 8] for at in range(0, len(bits), 8)]
    return bytes(sum(bit << place for place, bit in enumerate(octet)) for octet in octets)


def flags_of(values: Sequence[object | None], some: int, not_all: int) -> int:
    if all(value is None for value in values):
        return 0
    return some | not_all if any(value is None for value in values) else some


# --- reading ------------------------------------------------------------------


def decode(data: bytes) -> list[Message]:
    """The messages of a block."""
    if not HEADER.size <= len(data) <= MAX_BYTES:
        raise Bad("size")
    magic, checksum, version, flags, count, size, *sizes = HEADER.unpack(data[: HEADER.size])
    if magic != MAGIC:
        raise Bad("magic")
    if size != len(data):
        raise Bad("size")
    if checksum != xxhash.xxh64_intdigest(data[16:]):
        raise Bad("checksum")
    if version != 1:
        raise Bad("version")
    check_flags(flags, sizes)
    return Reader(data, flags, count, sizes).messages()


def check_flags(flags: int, sizes: Sequence[int]) -> None:
    _, keys, *headers = sizes
    if flags > 15 or (flags & NULL_KEYS and not flags & KEYS):
        raise Bad("flags")
    if flags & NULL_HEADERS and not flags & HEADERS:
        raise Bad("flags")
    if (keys and not flags & KEYS) or (any(headers) and not flags & HEADERS):
        raise Bad("sizes")


class Reader:
    """Cuts a block into its columns, then judges each."""

    def __init__(self, data: bytes, flags: int, count: int, sizes: Sequence[int]) -> None:
        bodies, keys, entries, names, values = sizes
        self.count, self.entries = count, entries
        n, m, bits = 4 * (count + 1), 4 * (entries + 1), (count + 7) // 8
        wanted = [
            ("times", 8 * count, True),
            ("body_offsets", n, True),
            ("bodies", bodies, True),
            ("key_bits", bits, flags & NULL_KEYS),
            ("key_offsets", n, flags & KEYS),
            ("keys", keys, flags & KEYS),
            ("header_bits", bits, flags & NULL_HEADERS),
            ("header_offsets", n, flags & HEADERS),
            ("name_offsets", m, flags & HEADERS),
            ("names", names, flags & HEADERS),
            ("value_offsets", m, flags & HEADERS),
            ("values", values, flags & HEADERS),
        ]
        there = [(name, size) for name, size, present in wanted if present]
        if count == 0 or HEADER.size + sum(size + -size % 8 for _, size in there) != len(data):
            raise Bad("sizes")
        self.columns: dict[str, tuple[bytes, bytes]] = {}  # content and padding
        at = HEADER.size
        for name, size in there:
            end = at + size + -size % 8
            self.columns[name] = data[at : at + size], data[at + size : end]
            at = end

    def messages(self) -> list[Message]:
        times = struct.unpack(f"<{self.count}q", self.columns["times"][0])
        bodies = self.strings("body_offsets", "bodies", self.count)
        keys = self.keys()
        headers = self.headers()
        return [Message(*fields) for fields in zip(times, bodies, keys, headers, strict=True)]

    def clear(self, name: str) -> bytes:
        content, padding = self.columns[name]
        if any(padding):
            raise Bad("padding")
        return content

    def offsets(self, name: str, count: int, size: int) -> tuple[int, ...]:
        found = struct.unpack(f"<{count + 1}i", self.columns[name][0])
        if found[0] != 0 or found[-1] != size or list(found) != sorted(found):
            raise Bad("offsets")
        return found

    def strings(self, offsets: str, data: str, count: int) -> list[bytes]:
        self.clear(offsets)
        content = self.clear(data)
        return split(content, self.offsets(offsets, count, len(content)))

    def has(self, name: str, sizes: Sequence[int]) -> list[bool]:
        """Which messages have something; a message that has not has the size 0."""
        if name not in self.columns:
            return [True] * self.count
        content = self.clear(name)
        bits = [bool(octet >> place & 1) for octet in content for place in range(8)]
        if any(bits[self.count :]):
            raise Bad("padding")
        bits = bits[: self.count]
        if all(bits) or not any(bits):
            raise Bad("validity")
        if any(size and not bit for size, bit in zip(sizes, bits, strict=True)):
            raise Bad("validity")
        return bits

    def keys(self) -> list[bytes | None]:
        if "keys" not in self.columns:
            return [None] * self.count
        keys = self.strings("key_offsets", "keys", self.count)
        has = self.has("key_bits", [len(key) for key in keys])
        require_text(keys)
        return [key if there else None for key, there in zip(keys, has, strict=True)]

    def headers(self) -> list[Pairs | None]:
        if "names" not in self.columns:
            return [None] * self.count
        self.clear("header_offsets")
        places = self.offsets("header_offsets", self.count, self.entries)
        names = self.strings("name_offsets", "names", self.entries)
        values = self.strings("value_offsets", "values", self.entries)
        pairs = list(zip(names, values, strict=True))
        maps = [tuple(pairs[start:end]) for start, end in pairwise(places)]
        has = self.has("header_bits", [len(one) for one in maps])
        require_text(names)
        return [one if there else None for one, there in zip(maps, has, strict=True)]


def split(content: bytes, places: Sequence[int]) -> list[bytes]:
    return [content[start:end] for start, end in pairwise(places)]


def require_text(values: Sequence[bytes]) -> None:
    for value in values:
        try:
            value.decode("utf-8")
        except UnicodeDecodeError:
            raise Bad("utf8") from None


# --- gathering ----------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    id: int
    shard: int
    offset: int
    timestamp_ns: int
    message: Message

    @property
    def weight(self) -> int:
        one = self.message
        pairs = sum(len(name) + len(value) for name, value in one.headers or ())
        return len(one.body) + len(one.key or b"") + pairs


@dataclass(frozen=True)
class Piece:
    """Messages start…end of a block whose message 0 stands at `first_offset`.

    `runs` are (first id, timestamp, count), over all messages of the block.
    """

    messages: Sequence[Message]
    runs: Sequence[tuple[int, int, int]]
    first_offset: int
    shard: int
    start: int
    end: int


def gather(
    pieces: Sequence[Piece],
    from_id: int,
    below_id: int,
    max_rows: int,
    max_bytes: int,
    by_piece: bool = False,
) -> list[Row]:
    """Rows by id (or as the pieces come), as many as the bounds allow, but one at least."""
    rows = [row for piece in pieces for row in rows_of(piece) if from_id <= row.id < below_id]
    if not by_piece:
        rows.sort(key=lambda row: row.id)
    taken: list[Row] = []
    for row in rows:
        over = len(taken) >= max_rows or sum(one.weight for one in [*taken, row]) > max_bytes
        if taken and over:
            break
        taken.append(row)
    return taken


def rows_of(piece: Piece) -> list[Row]:
    places = [(first + at, time) for first, time, count in piece.runs for at in range(count)]
    return [
        Row(places[at][0], piece.shard, piece.first_offset + at, places[at][1], message)
        for at, message in enumerate(piece.messages)
        if piece.start <= at < piece.end
    ]
