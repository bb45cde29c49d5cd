"""Reads as iterators of Arrow batches, which go on where they were after a restart of the bus."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.flight as flight

from polybus.native.connection import PASSING
from polybus.native.faults import translating

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.connection import Connection

NO_BOUND = 0


@dataclass(slots=True)
class Read:
    """What is wanted. `start` moves along with what was given."""

    topic: str
    shard: int | str
    start: int | None
    end: int | None
    max_rows: int
    wait_s: float

    def ticket(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "shard": self.shard,
            "from": self.start,
            "to": self.end,
            "max_rows": self.max_rows,
            "wait_ms": round(self.wait_s * 1000),
        }

    def took(self, batch: pa.RecordBatch) -> bool:
        """Whether that was all there was to take."""
        column = "id" if self.shard == "all" else "offset"
        self.start = batch.column(column)[-1].as_py() + 1
        if self.max_rows:
            self.max_rows -= batch.num_rows
            return self.max_rows <= 0
        return self.end is not None and self.start >= self.end


def read(connection: Connection, wanted: Read) -> Iterator[pa.RecordBatch]:
    """Batches until the end of the range, or until nothing came for `wait_s`."""
    deadline_s = time.monotonic() + connection.options.connect_timeout_s
    pauses = connection.pauses()
    while True:
        try:
            for batch in _once(connection, wanted):
                pauses, deadline_s = connection.pauses(), float("inf")
                yield batch
                if wanted.took(batch):
                    return
            return
        except PASSING:
            pause_s = next(pauses)
            if deadline_s == float("inf"):  # it was there: from now on it is missed
                deadline_s = time.monotonic() + connection.options.connect_timeout_s
            if time.monotonic() + pause_s > deadline_s or connection.closed.wait(pause_s):
                raise


def _once(connection: Connection, wanted: Read) -> Iterator[pa.RecordBatch]:
    ticket = flight.Ticket(json.dumps(wanted.ticket()).encode())
    with translating(connection.url):
        reader = connection.flight().do_get(ticket, connection.call_options())
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
