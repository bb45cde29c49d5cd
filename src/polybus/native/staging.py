"""A stage: batches that nobody sees until it is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.native.faults import told
from polybus.native.stream import PutStream

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.connection import Connection


class Stage:
    """Written by one thread. A connection that breaks ends the stage: begin a new one."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._streams: dict[str, PutStream] = {}

    def put(self, topic: str, rows: pa.RecordBatch) -> None:
        """On disk when this returns."""
        stream = self._streams.get(topic)
        if stream is None or not stream.schema.equals(rows.schema):
            path = ["stage", self.name, topic]
            stream = self._streams[topic] = PutStream(self._connection, path, rows.schema)
        stream.send(rows, None)
        answer = stream.answer()
        if "error" in answer:
            raise told(answer["error"])

    def close(self) -> None:
        """Ends its streams. What was put stays until it is published or its lease ends."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
