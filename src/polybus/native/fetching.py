"""`group.fetch`: one answer in JSON, and behind it the rows of some shards, each as Arrow IPC."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from polybus.errors import PeerError

if TYPE_CHECKING:
    from polybus.native.connection import Connection

FETCH = "group.fetch"
Fetched = tuple[dict[str, Any], list[pa.RecordBatch]]


def fetch(connection: Connection, request: dict[str, Any]) -> Fetched:
    """Tried again while no bus answers: a fetch changes nothing."""
    given = {key: value for key, value in request.items() if value is not None}
    return connection.patiently(lambda: _opened(connection, connection.results(FETCH, given)))


def _opened(connection: Connection, results: list[pa.Buffer]) -> Fetched:
    try:
        answer: dict[str, Any] = json.loads(results[0].to_pybytes())
        return answer, [_batch(one) for one in results[1:]]
    except (IndexError, ValueError, pa.ArrowException, StopIteration):
        raise PeerError(f"{connection.url} has given no answer to {FETCH}") from None


def _batch(raw: pa.Buffer) -> pa.RecordBatch:
    """Refers to what was received; it is copied only if it came as several batches."""
    with pa.ipc.open_stream(raw) as reader:
        first = reader.read_next_batch()
        rest = list(reader)
    if not rest:
        return first
    return pa.Table.from_batches([first, *rest]).combine_chunks().to_batches()[0]
