"""A put stream: batches in, one answer each, in order, as each is on disk.

The thread that gRPC gives reads batches and hands them over; a second one waits
for the outcome of the oldest and answers it. Between them stand at most so many
batches, and so many bytes: then reading stops, and the client feels it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.errors import MalformedRequest, PolybusError
from polybus.model.stamp import Stamp
from polybus.transports.flight.errors import as_json

if TYPE_CHECKING:
    from polybus.transports.flight.calls import Calls

MAX_METADATA_BYTES = 4096


class Awaited(NamedTuple):
    """A batch on its way, or one that was refused at once."""

    counter: int | None
    size: int
    outcome: Future[Any]


class Window:
    """Room for the batches of one stream. One that is larger than all of it goes alone."""

    def __init__(self, max_batches: int, max_bytes: int, calls: Calls) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._calls = calls
        self._batches = 0
        self._bytes = 0
        self._changed = Condition()

    def enter(self, size: int) -> None:
        """Waits for room. `StoreClosed` once the port stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(size))
            self._calls.owe()
            self._batches += 1
            self._bytes += size

    def leave(self, size: int) -> None:
        with self._changed:
            self._batches -= 1
            self._bytes -= size
            self._changed.notify()
        self._calls.settle()

    def _has_room(self, size: int) -> bool:
        fits = self._batches < self._max_batches and self._bytes + size <= self._max_bytes
        return fits or self._batches == 0


class Answering:
    """Answers what was handed over; `tell` makes an answer of an outcome."""

    def __init__(
        self,
        writer: Any,
        window: Window,
        tell: Callable[[int | None, Any], dict[str, Any]],
        handing_over: Callable[[], AbstractContextManager[None]],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._writer = writer
        self._window = window
        self._tell = tell
        self._handing_over = handing_over
        self._on_error = on_error
        self._queue: SimpleQueue[Awaited | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="polybus-answers", daemon=True)
        self._thread.start()

    def add(self, hand_over: Callable[[], Future[Any]], counter: int | None, size: int) -> None:
        """Hands a batch over once there is room; what is wrong with it is its answer."""
        self._window.enter(size)
        try:
            outcome = hand_over()
        except Exception as error:
            outcome = failed(error)
        self._queue.put(Awaited(counter, size, outcome))

    def refuse(self, error: PolybusError, counter: int | None) -> None:
        self.add(lambda: failed(error), counter, 0)

    def close(self) -> None:
        """Waits until all is answered, or nobody is there to be told."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_there = True
        while (one := self._queue.get()) is not None:
            if is_there:
                is_there = self._tell_client(self._answer(one))
            self._window.leave(one.size)

    def _tell_client(self, answer: dict[str, Any]) -> bool:
        """False if the client has gone: what it sent is carried out all the same."""
        try:
            with self._handing_over():
                self._writer.write(json.dumps(answer).encode())
        except Exception:
            return False
        return True

    def _answer(self, one: Awaited) -> dict[str, Any]:
        try:
            return self._tell(one.counter, one.outcome.result())
        except Exception as error:
            self._on_error(error)
            return {"counter": one.counter, "error": as_json(error)}


def failed(error: Exception) -> Future[Any]:
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
        found = json.loads(raw.decode("utf-8")) if raw else {}
    except (ValueError, RecursionError):
        raise MalformedRequest(f"{what} is no JSON") from None
    if not isinstance(found, dict):
        raise MalformedRequest(f"{what} is no JSON object")
    return found
