"""What a read gives: messages as columns in Arrow's memory layout, with their positions.

Nothing here is an object a message. `polybus.model.arrow` makes a RecordBatch of it
without copying; a dialect sends `bodies` cut at `body_offsets`.
"""

from __future__ import annotations

from dataclasses import dataclass

Column = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` messages. Numbers are little-endian: int64, but `shards` and `…_offsets` int32.

    A column that no message has anything in is None: keys (all null), headers (all null).
    A validity column is Arrow's bitmap (bit set: there is a value), None if all have one.
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
        """Of bodies, keys and headers: what the messages weigh, without their positions."""
        parts = (self.bodies, self.keys, self.header_names, self.header_values)
        return sum(len(part) for part in parts if part is not None)


EMPTY = Rows()
