"""One put stream to one topic: batches out, answers back, in order."""

from __future__ import annotations

import json
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from polybus.errors import ConnectionLost, NotConnected
from polybus.native.client.flight_errors import translate_errors

if TYPE_CHECKING:
    from polybus.native.client.flight_connection import FlightConnection

STREAM_ERRORS = (flight.FlightError, pa.ArrowException, OSError, ValueError)


class PutStream:
    """One thread may send while another waits for answers.

    gRPC allows one writer at a time, and ending a stream is writing: a lock keeps them apart.
    """

    def __init__(self, connection: FlightConnection, path: list[str], schema: pa.Schema) -> None:
        self._connection = connection
        self._url = connection.url
        self.schema = schema
        self._writing = Lock()
        self._has_ended = False
        descriptor = flight.FlightDescriptor.for_path(*path)
        with connection.borrow_client() as client:
            self._client = client
            options = connection.call_options()
            self._writer, self._reader = client.do_put(descriptor, schema, options)

    def send(self, rows: pa.RecordBatch, stamp: dict[str, Any] | None) -> None:
        metadata = json.dumps(stamp).encode() if stamp else b""
        with self._writing, translate_errors(self._url):
            if self._has_ended:
                raise ConnectionLost(f"{self._url} has ended the stream")
            self._writer.write_with_metadata(rows, metadata)

    def answer(self) -> dict[str, Any]:
        """The next answer. Errors of the stream itself come here, too."""
        try:
            found = self._read()
        except NotConnected:
            self._connection.discard_client(self._client)
            raise
        answer: dict[str, Any] = json.loads(found.to_pybytes())
        return answer

    def _read(self) -> pa.Buffer:
        with translate_errors(self._url):
            found = self._reader.read()
            if found is None:
                with self._writing:
                    self._has_ended = True
                    self._writer.close()  # raises what has ended the stream
                raise ConnectionLost(f"{self._url} has ended the stream")
            return found

    def finish(self) -> None:
        """Says that no more will come; whoever reads answers is then told of the end."""
        try:
            with self._writing:
                self._has_ended = True
                self._writer.done_writing()
        except STREAM_ERRORS:  # it has ended already
            pass

    def close(self) -> None:
        """Ends it, where nobody else reads answers."""
        self.finish()
        try:
            with self._writing:
                self._writer.close()
        except STREAM_ERRORS:
            pass
