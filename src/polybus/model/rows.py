"""The result of a read: messages as columns in Arrow's memory layout, with their positions.

There is no object per message. `polybus.model.arrow` makes a RecordBatch of it without
copying; a dialect sends `bodies` cut at `body_offsets`.
"""

from __future__ import annotations

from dataclasses import dataclass

Column = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` messages as columns of little-endian int64; `shards` and `…_offsets` are int32.

    A column without any value is None: keys (all null), headers (all null). A validity
    column is Arrow's bitmap (bit set: a value), None if every message has one.
    """

    count: int = 0
    ids: Column = b""
    shards: Column = b""
    offsets: Column = b""
    timestamps_ns: Column = b""
    insertion_ms: Column = b""
    body_offsets: Column = b"\0\0\0\0"
    bodies: Column = b""
    key_validity: Column | None = None
    key_offsets: Column | None = None
    keys: Column | None = None
    header_validity: Column | None = None
    header_offsets: Column | None = None  # of each message, into the entries
    header_name_offsets: Column | None = None
    header_names: Column | None = None
    header_value_offsets: Column | None = None
    header_values: Column | None = None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of bodies, keys and headers, without positions."""
        parts = (self.bodies, self.keys, self.header_names, self.header_values)
        return sum(len(part) for part in parts if part is not None)


EMPTY = Rows()
