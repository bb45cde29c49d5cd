"""Reads as iterators of Arrow batches, which continue after a restart of the bus.

The bus ends a read after at most `MAX_WAIT_S` without messages; a longer wait is several
reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polybus.model.topic import ALL
from polybus.native.client.flight_connection import RETRYABLE, RetryDelays
from polybus.native.protocol.requests import MAX_WAIT_MS

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.errors import PolybusError
    from polybus.native.client.transport import Transport
    from polybus.native.protocol.requests import ReadTicket

log = logging.getLogger("polybus.native")

MAX_WAIT_S = MAX_WAIT_MS / 1000  # of one call
WARN_AFTER_S = 5.0


class Reading:
    """An iterator of batches, for one thread. Any other thread may `cancel` it."""

    def __init__(self, transport: Transport, ticket: ReadTicket, wait_s: float) -> None:
        self._transport = transport
        self._ticket = ticket
        self._wait_s = wait_s
        self._rows = transport.open_rows()
        self._lost_s: float | None = None  # since when the bus is unreachable
        self._batches = self._read()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def close(self) -> None:
        """End the read early; only for the thread that iterates."""
        self._batches.close()

    def cancel(self) -> None:
        self._rows.cancel()

    def _read(self) -> Any:  # a generator, which mypy would not let be closed
        wanted, rows = self._ticket, self._rows
        position = "id" if wanted.shard == ALL else "offset"
        start, count = wanted.start, 0
        last_s = time.monotonic()  # of the last batch
        while not rows.is_cancelled():
            left_s = max(0.0, self._wait_s - (time.monotonic() - last_s))
            wait_ms = round(min(left_s, MAX_WAIT_S) * 1000)
            max_rows = wanted.max_rows and wanted.max_rows - count  # 0: no bound
            ticket = replace(wanted, start=start, max_rows=max_rows, wait_ms=wait_ms)
            try:
                for batch in rows.read(ticket):
                    self._lost_s = None
                    start = batch.column(position)[-1].as_py() + 1
                    count += batch.num_rows
                    yield batch
                    last_s = time.monotonic()
                    if wanted.max_rows and count >= wanted.max_rows:
                        return
                    if wanted.to is not None and start >= wanted.to:
                        return
            except RETRYABLE as error:
                if rows.is_cancelled():
                    return
                self._wait_for_bus(error)
                continue
            self._lost_s = None
            if time.monotonic() - last_s >= self._wait_s:
                return

    def _wait_for_bus(self, error: PolybusError) -> None:
        """Wait before the next attempt. Raises the error after `connect_timeout_s` of them."""
        options, closed, now_s = self._transport.options, self._transport.closed, time.monotonic()
        if self._lost_s is None:
            self._lost_s, self._has_warned = now_s, False
            self._delays = RetryDelays(options.first_backoff_s, options.last_backoff_s)
        delay_s, silent_s = next(self._delays), now_s - self._lost_s
        if closed.is_set() or silent_s + delay_s > options.connect_timeout_s:
            raise error
        if not self._has_warned and silent_s > WARN_AFTER_S:
            self._has_warned = True
            log.warning("read of %s is waiting for the bus: %s", self._ticket.topic, error)
        closed.wait(delay_s)
