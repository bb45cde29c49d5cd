"""`group.fetch`: one answer in JSON, and behind it the rows of some shards, as Arrow IPC."""

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
    """The batches refer to what was received."""
    try:
        answer: dict[str, Any] = json.loads(results[0].to_pybytes())
        batches = [batch for raw in results[1:] for batch in pa.ipc.open_stream(raw)]
    except (IndexError, ValueError, pa.ArrowException):
        raise PeerError(f"{connection.url} has given no answer to {FETCH}") from None
    if len(batches) != len(answer.get("rows", ())):
        raise PeerError(f"{connection.url} has given another number of batches than it said")
    return answer, batches
