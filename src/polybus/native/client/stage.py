"""A stage: batches that nobody sees until it is published."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from polybus.native.client.flight_connection import FlightConnection, decode_error
from polybus.native.client.produce_queue import check_bodies, check_rows, merge_messages
from polybus.native.client.put_stream import PutStream

# Enough that neither side waits for the other; the bus takes 64, and 32 MiB, of a stream.
MAX_UNANSWERED = 16
MAX_UNANSWERED_BYTES = 16 << 20
# Open at once: a stream has a thread in the bus, and a stage may be for many topics.
MAX_STREAMS = 32


class Stage:
    """Written by one thread. A connection that breaks ends the stage: begin a new one.

    What was put stays until it is published (`Client.publish`) or its lease ends.
    """

    def __init__(self, connection: FlightConnection, name: str, now_ms: Callable[[], int]) -> None:
        self.name = name
        self._connection = connection
        self._now_ms = now_ms
        self._streams: dict[str, PutStream] = {}
        self._unanswered: deque[tuple[PutStream, int]] = deque()
        self._in_flight_bytes = 0  # bytes

    def put(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> None:
        """On disk when this returns."""
        self.put_rows(topic, merge_messages([check_bodies(bodies, keys, self._now_ms())]))

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None:
        """The same, of a batch in the port's schema."""
        self.put_rows_nowait(topic, rows)
        self.flush()

    def put_rows_nowait(self, topic: str, rows: pa.RecordBatch) -> None:
        """The same, without waiting; what went wrong is raised by a later call, at the latest
        by `settle`. Waits only while too many are on their way."""
        stream = self._stream(topic, check_rows(rows).schema)
        stream.send(rows, None)
        self._unanswered.append((stream, rows.nbytes))
        self._in_flight_bytes += rows.nbytes
        while (
            len(self._unanswered) > MAX_UNANSWERED or self._in_flight_bytes > MAX_UNANSWERED_BYTES
        ):
            self._read_answer()

    def flush(self) -> None:
        """Returns once all that was handed over is on disk."""
        while self._unanswered:
            self._read_answer()

    def close(self) -> None:
        """Ends its streams, and no more."""
        self._unanswered.clear()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, topic: str, schema: pa.Schema) -> PutStream:
        stream = self._streams.get(topic)
        if stream is None or not stream.schema.equals(schema):
            if stream is not None:
                self.flush()
                stream.close()
            elif len(self._streams) >= MAX_STREAMS:
                self.flush()
                self._streams.pop(next(iter(self._streams))).close()
            path = ["stage", self.name, topic]
            stream = self._streams[topic] = PutStream(self._connection, path, schema)
        return stream

    def _read_answer(self) -> None:
        stream, size = self._unanswered.popleft()
        self._in_flight_bytes -= size
        answer = stream.answer()
        if "error" in answer:
            raise decode_error(answer["error"])
