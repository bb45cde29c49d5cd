"""One put stream to one topic: batches out, answers back, in order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow.flight as flight

from polybus.errors import ConnectionLost
from polybus.native.faults import translating

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.connection import Connection


class PutStream:
    """`send` and `answer` may be called by two threads, one each."""

    def __init__(self, connection: Connection, path: list[str], schema: pa.Schema) -> None:
        self._url = connection.url
        self.schema = schema
        descriptor = flight.FlightDescriptor.for_path(*path)
        with translating(self._url):
            self._writer, self._reader = connection.flight().do_put(
                descriptor, schema, connection.call_options()
            )

    def send(self, rows: pa.RecordBatch, stamp: dict[str, Any] | None) -> None:
        metadata = json.dumps(stamp).encode() if stamp else b""
        with translating(self._url):
            self._writer.write_with_metadata(rows, metadata)

    def answer(self) -> dict[str, Any]:
        """The next answer. Errors of the stream itself come here, too."""
        with translating(self._url):
            found = self._reader.read()
            if found is None:
                self._writer.close()  # raises what has ended the stream
                raise ConnectionLost(f"{self._url} has ended the stream")
        answer: dict[str, Any] = json.loads(found.to_pybytes())
        return answer

    def finish(self) -> None:
        """Says that no more will come; whoever reads answers is then told of the end."""
        try:
            self._writer.done_writing()
        except (flight.FlightError, OSError, ValueError):  # it has ended already
            pass

    def close(self) -> None:
        """Ends it, where nobody else reads answers."""
        self.finish()
        try:
            self._writer.close()
        except (flight.FlightError, OSError, ValueError):
            pass
