"""The interface of a bus for FDQ's clients: a running bus by its URL, or one in this process.

Clients call `connect` of this module at run time, so that tests can replace it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from polybus.store.engine_registry import is_store_url

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native import ClientOptions, Produced


class RowReader(Protocol):
    """Batches of the port's read schema, for one thread. Any other thread may `cancel`."""

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...
    def __next__(self) -> pa.RecordBatch: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class BusProducer(Protocol):
    """Stores each batch exactly once, in order. Each call is one atomic batch."""

    name: str
    epoch: int

    @property
    def is_closed(self) -> bool: ...
    def produce(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None] | None = None
    ) -> Future[Produced]: ...
    def produce_rows(self, topic: str, rows: pa.RecordBatch) -> Future[Produced]: ...
    def flush(self, timeout_s: float | None = None) -> bool: ...
    def close(self, timeout_s: float | None = None) -> None: ...


class BusStage(Protocol):
    """Batches that become visible when they are published."""

    name: str

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None: ...
    def close(self) -> None: ...


class BusClient(Protocol):
    """Blocking and thread-safe. Raises the errors of `polybus.errors`."""

    def act(self, name: str, /, **request: Any) -> dict[str, Any]: ...
    def fetch(self, **request: Any) -> tuple[dict[str, Any], list[pa.RecordBatch]]:
        """Run `group.fetch`. Returns its object and a batch per entry of "rows"."""

    def follow(
        self, **request: Any
    ) -> Iterator[tuple[dict[str, Any] | None, pa.RecordBatch | None]]:
        """Run `group.fetch` with `follow`. Yields objects, None for rows alone, and rows."""

    def read(
        self,
        topic: str,
        shard: int | str = "all",
        start: int | None = None,
        end: int | None = None,
        *,
        max_rows: int = 0,
        wait_s: float = 0.0,
    ) -> RowReader: ...
    def producer(self, name: str | None = None, *, create: bool = True) -> BusProducer:
        """Without `create` producing to a missing topic fails."""

    def stage(self, lease_s: float = 600.0) -> BusStage: ...
    def hurry(self, timeout_s: float) -> None:
        """Limit the time to wait for an unreachable bus."""

    def close(self, timeout_s: float | None = None) -> None: ...


def connect(url: str | None = None, options: ClientOptions | None = None) -> BusClient:
    """Return a client of a URL; without one of `$POLYBUS_URL`, else of the default port.

    `options` apply to a running bus only.
    """
    from polybus.native.client.native_options import bus_url

    target = bus_url(url, os.environ)
    if is_in_process(target):
        from polybus.native.inprocess import open_bus

        return open_bus(target)
    from polybus.native import Client

    return Client(target, options)


def is_in_process(url: str) -> bool:
    """Return whether a URL names a bus inside this process."""
    return is_store_url(url)
