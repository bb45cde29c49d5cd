"""Batches read ahead by a second thread.

A thread that blocks inside Arrow does not handle Ctrl-C. So a second thread reads, and the
main thread waits in Python, where signals arrive. The number of batches read ahead is bounded.
"""

from __future__ import annotations

from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

AHEAD = 2
LEAVE_S = 2.0  # wait for a cancelled read to end


class CancellableReader(Protocol):
    def __iter__(self) -> Iterator[pa.RecordBatch]: ...
    def cancel(self) -> None: ...


class ReadAhead:
    def __init__(self, reading: CancellableReader) -> None:
        self._reading = reading
        self._queue: Queue[pa.RecordBatch | BaseException | None] = Queue(AHEAD)
        self._left = Event()
        self._thread = Thread(target=self._run, name="polybus-fetching", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._reading.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join(LEAVE_S)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (found := self._queue.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found

    def _run(self) -> None:
        try:
            for batch in self._reading:
                self._queue.put(batch)
                if self._left.is_set():
                    return
        except Exception as error:
            self._queue.put(error)
        else:
            self._queue.put(None)
