"""Reads as iterators of Arrow batches, which continue after a restart of the bus.

The bus ends a read after at most `MAX_WAIT_S` without messages; a longer wait is several
reads.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow.flight as flight

from polybus.errors import ConnectionLost
from polybus.native.client.flight_connection import RETRYABLE

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.flight_connection import FlightConnection

log = logging.getLogger("polybus.native")

NO_BOUND = 0
MAX_WAIT_S = 30.0  # of one call
WARN_AFTER_S = 5.0


@dataclass(slots=True)
class ReadRange:
    """The range to read. `start` advances with the batches returned."""

    topic: str
    shard: int | str
    start: int | None
    end: int | None
    max_rows: int
    wait_s: float
    columns: frozenset[str] | None = None

    @property
    def position(self) -> str:
        """The name of the column with the position."""
        return "id" if self.shard == "all" else "offset"

    def ticket(self, wait_s: float) -> dict[str, Any]:
        some = None if self.columns is None else sorted(self.columns | {self.position})
        return ({} if some is None else {"columns": some}) | {
            "topic": self.topic,
            "shard": self.shard,
            "from": self.start,
            "to": self.end,
            "max_rows": self.max_rows,
            "wait_ms": round(min(wait_s, MAX_WAIT_S) * 1000),
        }

    def advance(self, batch: pa.RecordBatch) -> bool:
        """Advance past a batch. Returns whether the range is complete."""
        self.start = batch.column(self.position)[-1].as_py() + 1
        if self.max_rows:
            self.max_rows -= batch.num_rows
            if self.max_rows <= 0:
                return True
        return self.end is not None and self.start >= self.end


class Reading:
    """An iterator of batches, for one thread. Any other thread may `cancel` it."""

    def __init__(self, connection: FlightConnection, wanted: ReadRange) -> None:
        self._connection = connection
        self._wanted = wanted
        self._lock = Lock()
        self._reader: Any = None
        self._cancelled = False
        self._batches = self._read()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def close(self) -> None:
        """End the read early; only for the thread that iterates."""
        self._batches.close()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._reader is not None:
                self._reader.cancel()

    def _is_cancelled(self) -> bool:
        return self._cancelled

    def _read(self) -> Any:  # a generator, which mypy would not let be closed
        wanted, options = self._wanted, self._connection.options
        pauses = self._connection.retry_delays()
        lost_s: float | None = None
        heard_s, has_warned = time.monotonic(), False
        while not self._is_cancelled():
            try:
                for batch in self._read_once(wanted.wait_s - (time.monotonic() - heard_s)):
                    pauses, lost_s, has_warned = self._connection.retry_delays(), None, False
                    is_all = wanted.advance(batch)
                    yield batch
                    heard_s = time.monotonic()
                    if is_all:
                        return
                lost_s = None
                if time.monotonic() - heard_s >= wanted.wait_s:
                    return
            except RETRYABLE as error:
                if self._is_cancelled():
                    return
                lost_s = lost_s or time.monotonic()
                pause_s, silent_s = next(pauses), time.monotonic() - lost_s
                if silent_s + pause_s > options.connect_timeout_s:
                    raise
                if not has_warned and silent_s > WARN_AFTER_S:
                    has_warned = True
                    log.warning("read of %s is waiting for the bus: %s", wanted.topic, error)
                self._connection.closed.wait(pause_s)

    def _read_once(self, wait_s: float) -> Iterator[pa.RecordBatch]:
        ticket = flight.Ticket(json.dumps(self._wanted.ticket(max(wait_s, 0.0))).encode())
        with self._connection.borrow_client() as client:
            reader = self._open(client, ticket)
            try:
                while True:
                    try:
                        chunk = reader.read_chunk()
                    except StopIteration:
                        return
                    if chunk.data is not None and chunk.data.num_rows:
                        yield chunk.data
            finally:
                reader.cancel()

    def _open(self, client: flight.FlightClient, ticket: Any) -> Any:
        reader = client.do_get(ticket, self._connection.call_options())
        with self._lock:
            self._reader = reader
            if self._cancelled:
                reader.cancel()
                raise ConnectionLost("the read was cancelled")
        return reader
