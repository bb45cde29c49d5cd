"""A stage: batches that nobody sees until it is published."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from polybus.native.client.flight_connection import Connection
from polybus.native.client.flight_errors import told
from polybus.native.client.produce_messages import bodies_of, merged, rows_of
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

    def __init__(self, connection: Connection, name: str, now_ms: Callable[[], int]) -> None:
        self.name = name
        self._connection = connection
        self._now_ms = now_ms
        self._streams: dict[str, PutStream] = {}
        self._unanswered: deque[tuple[PutStream, int]] = deque()
        self._on_their_way = 0  # bytes

    def put(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> None:
        """On disk when this returns."""
        self.put_rows(topic, merged([bodies_of(bodies, keys, self._now_ms())]))

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None:
        """The same, of a batch in the port's schema."""
        self.hand_over(topic, rows)
        self.settle()

    def hand_over(self, topic: str, rows: pa.RecordBatch) -> None:
        """The same, without waiting; what went wrong is raised by a later call, at the latest
        by `settle`. Waits only while too many are on their way."""
        stream = self._stream(topic, rows_of(rows).schema)
        stream.send(rows, None)
        self._unanswered.append((stream, rows.nbytes))
        self._on_their_way += rows.nbytes
        while len(self._unanswered) > MAX_UNANSWERED or self._on_their_way > MAX_UNANSWERED_BYTES:
            self._answer()

    def settle(self) -> None:
        """Returns once all that was handed over is on disk."""
        while self._unanswered:
            self._answer()

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
                self.settle()
                stream.close()
            elif len(self._streams) >= MAX_STREAMS:
                self.settle()
                self._streams.pop(next(iter(self._streams))).close()
            path = ["stage", self.name, topic]
            stream = self._streams[topic] = PutStream(self._connection, path, schema)
        return stream

    def _answer(self) -> None:
        stream, size = self._unanswered.popleft()
        self._on_their_way -= size
        answer = stream.answer()
        if "error" in answer:
            raise told(answer["error"])
