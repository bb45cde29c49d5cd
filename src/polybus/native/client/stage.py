"""A stage: batches that become visible together when it is published."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import pyarrow as pa

from polybus.native.client.flight_connection import decode_error
from polybus.native.client.produce_queue import check_bodies, check_rows, merge_messages
from polybus.native.client.transport import StageStream, Transport

# Enough to keep both sides busy; the bus accepts 64 batches and 32 MiB per stream.
MAX_UNANSWERED = 16
MAX_UNANSWERED_BYTES = 16 << 20
# Open streams: each has a thread in the bus, and a stage may be for many topics.
MAX_STREAMS = 32


class Stage:
    """A stage, for one thread. After a lost connection a new stage must be opened.

    Batches are kept until the stage is published (`Client.publish`) or its lease ends.
    """

    def __init__(self, transport: Transport, name: str, now_ms: Callable[[], int]) -> None:
        self.name = name
        self._transport = transport
        self._now_ms = now_ms
        self._streams: dict[str, StageStream] = {}
        self._unanswered: deque[tuple[StageStream, int]] = deque()
        self._in_flight_bytes = 0

    def put(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> None:
        """Put one batch. It is on disk when this returns."""
        self.put_rows(topic, merge_messages([check_bodies(bodies, keys, self._now_ms())]))

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None:
        """Put a batch of the port's schema. It is on disk when this returns."""
        self.put_rows_nowait(topic, rows)
        self.flush()

    def put_rows_nowait(self, topic: str, rows: pa.RecordBatch) -> None:
        """Put a batch without waiting for its answer; a later call or `flush` raises errors.

        Waits only while `MAX_UNANSWERED` batches or bytes are in flight.
        """
        stream = self._stream(topic, check_rows(rows).schema)
        stream.send(rows, None)
        self._unanswered.append((stream, rows.nbytes))
        self._in_flight_bytes += rows.nbytes
        while (
            len(self._unanswered) > MAX_UNANSWERED or self._in_flight_bytes > MAX_UNANSWERED_BYTES
        ):
            self._read_answer()

    def flush(self) -> None:
        """Wait until all batches are on disk."""
        while self._unanswered:
            self._read_answer()

    def close(self) -> None:
        """Close the streams. The stage itself is kept."""
        self._unanswered.clear()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, topic: str, schema: pa.Schema) -> StageStream:
        stream = self._streams.get(topic)
        if stream is None or not stream.schema.equals(schema):
            if stream is not None:
                self.flush()
                stream.close()
            elif len(self._streams) >= MAX_STREAMS:
                self.flush()
                self._streams.pop(next(iter(self._streams))).close()
            stream = self._streams[topic] = self._transport.open_stage_stream(
                self.name, topic, schema
            )
        return stream

    def _read_answer(self) -> None:
        stream, size = self._unanswered.popleft()
        self._in_flight_bytes -= size
        answer = stream.answer()
        if "error" in answer:
            raise decode_error(answer["error"])
