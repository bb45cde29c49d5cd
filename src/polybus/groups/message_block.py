"""Single messages that are committed together with an ack, as blocks for their topics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import TooLarge

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.rows import Rows

MAX_SHARD_KEY_BYTES: Final = 1024  # as FDQ's: a key is hashed and stored for every message

Headers = Sequence[tuple[str, bytes]]


class OutputMessage(NamedTuple):
    key: str | None
    body: bytes
    headers: Headers | None
    insertion_ms: int


def build_block(messages: Iterable[OutputMessage]) -> Block:
    """Build a block of at least one message. Raises `TooLarge` for a key over its limit."""
    import pyarrow as pa  # here, because a bus without groups does not need it

    from polybus.model import arrow

    keys, bodies, headers, times = zip(*messages, strict=True)
    if any(len(key.encode()) > MAX_SHARD_KEY_BYTES for key in keys if key is not None):
        raise TooLarge(f"shard key must have at most {MAX_SHARD_KEY_BYTES} bytes")
    columns = [
        pa.array(keys, pa.utf8()),
        pa.array(bodies, pa.binary()),
        pa.array(times, pa.int64()),
        pa.array(headers, arrow.HEADERS_TYPE),
    ]
    return arrow.block_of(pa.record_batch(columns, schema=arrow.PRODUCE_SCHEMA), 0)


def read_messages(rows: Rows) -> list[tuple[int, OutputMessage]]:
    """Return each row as its id and message."""
    from polybus.model import arrow

    return [
        (
            row["id"],
            OutputMessage(row["shard_key"], row["body"], row["headers"], row["insertion_ms"]),
        )
        for row in arrow.batch_of(rows).to_pylist()
    ]
