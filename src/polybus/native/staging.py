"""A stage: batches that nobody sees until it is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from polybus.native.connection import Connection
from polybus.native.faults import told
from polybus.native.messages import bodies_of, merged, rows_of
from polybus.native.stream import PutStream


class Stage:
    """Written by one thread. A connection that breaks ends the stage: begin a new one.

    What was put stays until it is published (`Client.publish`) or its lease ends.
    """

    def __init__(self, connection: Connection, name: str, now_ms: Callable[[], int]) -> None:
        self.name = name
        self._connection = connection
        self._now_ms = now_ms
        self._streams: dict[str, PutStream] = {}

    def put(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> None:
        """On disk when this returns."""
        self.put_rows(topic, merged([bodies_of(bodies, keys, self._now_ms())]))

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None:
        """The same, of a batch in the port's schema."""
        stream = self._stream(topic, rows_of(rows).schema)
        stream.send(rows, None)
        answer = stream.answer()
        if "error" in answer:
            raise told(answer["error"])

    def close(self) -> None:
        """Ends its streams, and no more."""
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
                stream.close()
            path = ["stage", self.name, topic]
            stream = self._streams[topic] = PutStream(self._connection, path, schema)
        return stream
