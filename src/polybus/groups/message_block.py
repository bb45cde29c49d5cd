"""Messages one by one, as they come with an ack, made into blocks for their topics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import TooLarge

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.rows import Rows

MAX_SHARD_KEY_BYTES: Final = 1024  # FDQ's: a key is a name, and each is hashed and stored

Headers = Sequence[tuple[str, bytes]]


class OutputMessage(NamedTuple):
    key: str | None
    body: bytes
    headers: Headers | None
    insertion_ms: int


def block_of(messages: Iterable[OutputMessage]) -> Block:
    """One block of one message or more, in their order."""
    import pyarrow as pa  # not everybody who loads the bus has groups

    from polybus.model import arrow

    keys, bodies, headers, times = zip(*messages, strict=True)
    if any(len(key.encode()) > MAX_SHARD_KEY_BYTES for key in keys if key is not None):
        raise TooLarge(f"a shard key has at most {MAX_SHARD_KEY_BYTES} bytes")
    columns = [
        pa.array(keys, pa.utf8()),
        pa.array(bodies, pa.binary()),
        pa.array(times, pa.int64()),
        pa.array(headers, arrow.HEADERS_TYPE),
    ]
    return arrow.block_of(pa.record_batch(columns, schema=arrow.PRODUCE_SCHEMA), 0)


def messages_of(rows: Rows) -> list[tuple[int, OutputMessage]]:
    """What was read, one by one, each with its id."""
    from polybus.model import arrow

    return [
        (
            row["id"],
            OutputMessage(row["shard_key"], row["body"], row["headers"], row["insertion_ms"]),
        )
        for row in arrow.batch_of(rows).to_pylist()
    ]
