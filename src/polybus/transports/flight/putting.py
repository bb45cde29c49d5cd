"""A put stream: batches in, one answer each, in order, as each is on disk.

The thread that gRPC gives reads batches and hands them over; a second one waits
for the outcome of the oldest and answers it. Between them stand at most so many
batches: then reading stops, and the client feels it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, NamedTuple

from polybus.errors import MalformedRequest, PolybusError
from polybus.model.stamp import Stamp
from polybus.transports.flight.errors import as_json

MAX_METADATA_BYTES = 4096


class Awaited(NamedTuple):
    """A batch on its way, or one that was refused at once."""

    counter: int | None
    outcome: Future[Any]


class Answering:
    """Answers what was handed over; `tell` makes an answer of an outcome."""

    def __init__(
        self,
        writer: Any,
        max_in_flight: int,
        tell: Callable[[int | None, Any], dict[str, Any]],
        handing_over: Callable[[], AbstractContextManager[None]],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._writer = writer
        self._places = Semaphore(max_in_flight)
        self._tell = tell
        self._handing_over = handing_over
        self._on_fault = on_fault
        self._queue: SimpleQueue[Awaited | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="polybus-answers", daemon=True)
        self._thread.start()

    def add(self, hand_over: Callable[[], Future[Any]], counter: int | None) -> None:
        self._places.acquire()
        try:
            outcome = hand_over()
        except PolybusError as error:
            outcome = failed(error)
        self._queue.put(Awaited(counter, outcome))

    def refuse(self, error: PolybusError, counter: int | None) -> None:
        self._places.acquire()
        self._queue.put(Awaited(counter, failed(error)))

    def close(self) -> None:
        """Waits until all is answered, or nobody is there to be told."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            answer = self._answer(one)
            try:
                with self._handing_over():
                    self._writer.write(json.dumps(answer).encode())
            except Exception:  # the client has gone: what it sent is carried out all the same
                self._on_gone()
                return
            self._places.release()

    def _on_gone(self) -> None:
        """Nobody reads answers any more, but the reader must not wait for a place."""
        while self._queue.get() is not None:
            self._places.release()

    def _answer(self, one: Awaited) -> dict[str, Any]:
        try:
            return self._tell(one.counter, one.outcome.result())
        except Exception as error:
            if not isinstance(error, PolybusError):
                self._on_fault(error)
            return {"counter": one.counter, "error": as_json(error)}


def failed(error: PolybusError) -> Future[Any]:
    outcome: Future[Any] = Future()
    outcome.set_exception(error)
    return outcome


def read_stamp(metadata: Any) -> Stamp | None:
    """The stamp in a batch's app_metadata; None if there is none."""
    if metadata is None or metadata.size == 0:
        return None
    return Stamp.parse(read_json(metadata.to_pybytes(), MAX_METADATA_BYTES, "app_metadata"))


def read_json(raw: bytes, max_bytes: int, what: str) -> dict[str, Any]:
    """An object in JSON, or `MalformedRequest` that says what is wrong with it."""
    if len(raw) > max_bytes:
        raise MalformedRequest(f"{what} has {len(raw)} bytes: at most {max_bytes} are read")
    try:
        found = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise MalformedRequest(f"{what} is no JSON") from None
    if not isinstance(found, dict):
        raise MalformedRequest(f"{what} is no JSON object")
    return found
