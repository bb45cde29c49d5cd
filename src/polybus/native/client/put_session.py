"""One stream to one topic, and the thread that reads its answers, until something breaks."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any

from polybus.errors import ConnectionLost, PeerError, PolybusError
from polybus.native.client.flight_errors import decode_error
from polybus.native.client.put_stream import PutStream

if TYPE_CHECKING:
    from polybus.native.client.flight_connection import FlightConnection
    from polybus.native.client.produce_queue import ProduceBatch


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
