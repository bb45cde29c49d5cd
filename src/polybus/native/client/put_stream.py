"""One put stream to one topic: batches out, answers back, in order.

One stream to one topic, and the thread that reads its answers, until something breaks.
"""

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


class PutSession:
    """Once `fault` is set nothing more will be answered: it is to be closed."""

    def __init__(
        self,
        connection: FlightConnection,
        path: list[str],
        first: ProduceBatch,
        on_answer: Callable[[PutSession, dict[str, Any]], None],
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
        broken = self.fault or self._send_error
        return self._stream is not None and broken is None

    def accepts(self, topic: str, schema: Any) -> bool:
        return topic == self._topic and (schema is self._schema or schema.equals(self._schema))

    def send(self, batch: ProduceBatch, producer: str, epoch: int) -> None:
        """A failure is told by the thread that reads: it knows what the bus has said."""
        assert self._stream is not None
        stamp = {"producer": producer, "epoch": epoch, "counter": batch.counter}
        try:
            self._stream.send(batch.rows(), stamp)
        except PolybusError as error:
            self._send_error = error
            self._stream.finish()

    def interrupt(self) -> None:
        """Nobody knows how far a batch has got: the stream ends, and its fault is told."""
        if self._stream is not None:
            self._send_error = ConnectionLost("whoever sent was interrupted")
            self._stream.finish()

    def close(self) -> None:
        """Says that no more will come, and waits until the bus has answered all."""
        if self._stream is not None:
            self._stream.finish()
        if self._thread is not None:
            self._thread.join()

    def _receive(self) -> None:
        try:
            self._read_answers()
        except ConnectionLost as error:
            self._fail(self._send_error or error)
        except PolybusError as error:
            self._fail(error)
        except Exception as error:  # whoever waits must hear of it, whatever it is
            self._fail(PeerError(f"an answer that makes no sense: {error!r}"))
        self._drain()

    def _read_answers(self) -> None:
        assert self._stream is not None
        while True:
            answer = self._stream.answer()
            if "error" in answer:
                raise decode_error(answer["error"])
            self._on_answer(self, answer)

    def _drain(self) -> None:
        """What is behind a refusal was refused, too; all of it was judged when this ends."""
        assert self._stream is not None
        try:
            while True:
                self._stream.answer()
        except Exception:
            self._stream.close()

    def _fail(self, error: PolybusError) -> None:
        self.fault = error
        self._on_fault()
