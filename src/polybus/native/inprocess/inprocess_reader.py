"""Reads as iterators of Arrow batches, the same as over the port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from polybus.model.arrow import batch_of

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.range_reader import ReadRange
    from polybus.native.inprocess.inprocess_bus import InProcessBus


class InProcessReader:
    """An iterator of batches, for one thread; `cancel` ends it from any other."""

    def __init__(
        self,
        core: InProcessBus,
        wanted: ReadRange,
        check: Callable[[], None],
        is_closed: Callable[[], bool],
    ) -> None:
        self._core = core
        self._wanted = wanted
        self._check = check
        self._is_closed = is_closed
        self._cancelled = False
        self._batches = self._read()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def close(self) -> None:
        """By the thread that iterates, if it does not go on to the end."""
        self._batches.close()

    def cancel(self) -> None:
        self._cancelled = True
        self._core.port.waits.check_callers()

    def _is_over(self) -> bool:
        return self._cancelled or self._is_closed()

    def _read(self) -> Any:  # a generator, which mypy would not let be closed
        port, wanted = self._core.port, self._wanted
        caller = port.new_caller(self._core.identity, self._is_over)
        heard_s = time.monotonic()
        while not self._cancelled:
            self._check()
            left_s = max(0.0, wanted.wait_s - (time.monotonic() - heard_s))
            for rows in port.read(caller, wanted.ticket(left_s)):
                batch = batch_of(rows)
                is_all = wanted.advance(batch)
                yield batch
                if is_all or self._cancelled:
                    return
                self._check()
                heard_s = time.monotonic()
            if time.monotonic() - heard_s >= wanted.wait_s:
                return
