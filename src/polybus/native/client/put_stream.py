"""Put streams: one stream of batches to one topic, and a session with a thread for answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from polybus.errors import ConnectionLost, NotConnected, PeerError, PolybusError
from polybus.native.client.flight_connection import decode_error, translate_errors

if TYPE_CHECKING:
    from polybus.native.client.flight_connection import FlightConnection
    from polybus.native.client.produce_queue import ProduceBatch

STREAM_ERRORS = (flight.FlightError, pa.ArrowException, OSError, ValueError)


class PutStream:
    """A put stream. One thread may send while another waits for answers.

    gRPC allows one writer at a time, and ending a stream is a write, so both take a lock.
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
                raise ConnectionLost(f"{self._url} closed the stream")
            self._writer.write_with_metadata(rows, metadata)

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Raises errors of the stream itself."""
        try:
            with translate_errors(self._url):
                buffer = self._reader.read()
                if buffer is None:
                    with self._writing:
                        self._has_ended = True
                        self._writer.close()  # raises the error that ended the stream
                    raise ConnectionLost(f"{self._url} closed the stream")
        except NotConnected:
            self._connection.discard_client(self._client)
            raise
        answer: dict[str, Any] = json.loads(buffer.to_pybytes())
        return answer

    def finish(self) -> None:
        """Half-close the stream; the reader of answers then sees its end."""
        try:
            with self._writing:
                self._has_ended = True
                self._writer.done_writing()
        except STREAM_ERRORS:  # the stream has ended already
            pass

    def close(self) -> None:
        """Close the stream. No other thread may read answers."""
        self.finish()
        try:
            with self._writing:
                self._writer.close()
        except STREAM_ERRORS:
            pass


class PutSession:
    """A put stream with a reading thread. Once `fault` is set, it must be closed."""

    def __init__(
        self,
        connection: FlightConnection,
        path: list[str],
        first: ProduceBatch,
        on_answer: Callable[[dict[str, Any]], None],
        on_fault: Callable[[], None],
    ) -> None:
        self.fault: PolybusError | None = None
        self._topic = first.topic
        self._schema = first.schema
        self._on_answer = on_answer
        self._on_fault = on_fault
        self._send_error: PolybusError | None = None
        self._stream: PutStream | None = None
        self._thread: Thread | None = None
        try:
            self._stream = PutStream(connection, path, self._schema)
        except PolybusError as error:
            self._fail(error)
            return
        self._thread = Thread(target=self._receive, name="polybus-answers", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._stream is not None and self.fault is None and self._send_error is None

    def accepts(self, topic: str, schema: Any) -> bool:
        return topic == self._topic and (schema is self._schema or schema.equals(self._schema))

    def send(self, batch: ProduceBatch, producer: str, epoch: int) -> None:
        """Send a batch. The reading thread reports failures because it sees the bus's answer."""
        assert self._stream is not None
        stamp: dict[str, Any] = {"producer": producer, "epoch": epoch, "counter": batch.counter}
        if batch.delivery is not None:
            stamp |= batch.delivery.to_fields()
        try:
            self._stream.send(batch.rows(), stamp)
        except PolybusError as error:
            self._send_error = error
            self._stream.finish()

    def interrupt(self) -> None:
        """End the stream after an interrupted send, whose outcome is unknown."""
        if self._stream is not None:
            self._send_error = ConnectionLost("the sending thread was interrupted")
            self._stream.finish()

    def close(self) -> None:
        """Half-close the stream and wait until the bus has answered all batches."""
        if self._stream is not None:
            self._stream.finish()
        if self._thread is not None:
            self._thread.join()

    def _receive(self) -> None:
        assert self._stream is not None
        try:
            while True:
                answer = self._stream.answer()
                if "error" in answer:
                    raise decode_error(answer["error"])
                self._on_answer(answer)
        except ConnectionLost as error:
            # The error of a failed send says more than the end of the stream that it caused.
            self._fail(self._send_error or error)
        except PolybusError as error:
            self._fail(error)
        except Exception as error:  # waiting callers must see every error
            self._fail(PeerError(f"invalid answer from the bus: {error!r}"))
        # After a refusal, `close` must wait until the bus has processed all batches: read on.
        try:
            while True:
                self._stream.answer()
        except Exception:
            self._stream.close()

    def _fail(self, error: PolybusError) -> None:
        self.fault = error
        self._on_fault()
