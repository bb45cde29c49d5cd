"""The bus as FDQ's clients see it: a running one by its URL, or one inside this process.

Both have the same face. Clients reach it by `connect` of this module, at the time of
the call, so that tests can put a recorder in between.
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
    """Batches of the port's read schema, for one thread; any other may `cancel`."""

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...
    def __next__(self) -> pa.RecordBatch: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class BusProducer(Protocol):
    """What is handed over arrives once, in order. Each call is one atomic batch."""

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
    """Batches that nobody sees until they are published."""

    name: str

    def put_rows(self, topic: str, rows: pa.RecordBatch) -> None: ...
    def close(self) -> None: ...


class BusClient(Protocol):
    """Blocking, for any number of threads; errors are those of `polybus.errors`."""

    def act(self, name: str, /, **request: Any) -> dict[str, Any]: ...
    def fetch(self, **request: Any) -> tuple[dict[str, Any], list[pa.RecordBatch]]:
        """`group.fetch`: what it says, and a batch for each entry of its "rows"."""

    def follow(
        self, **request: Any
    ) -> Iterator[tuple[dict[str, Any] | None, pa.RecordBatch | None]]:
        """`group.fetch` that goes on: what it says if that is more than rows, and the rows."""

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
        """Without `create` a topic that is not there is refused, and not made."""

    def stage(self, lease_s: float = 600.0) -> BusStage: ...
    def hurry(self, timeout_s: float) -> None:
        """From now on a bus that is away is waited for no longer than this."""

    def close(self, timeout_s: float | None = None) -> None: ...


def connect(url: str | None = None, options: ClientOptions | None = None) -> BusClient:
    """The bus behind a URL; without one `$POLYBUS_URL`, else the default port.

    `options` are for a running bus; one inside the process has no use for them.
    """
    from polybus.native.client.native_options import bus_url

    found = bus_url(url, os.environ)
    if is_in_process(found):
        from polybus.native.inprocess import open_bus

        return open_bus(found)
    from polybus.native import Client

    return Client(found, options)


def is_in_process(url: str) -> bool:
    """Is it a bus inside the process?"""
    return is_store_url(url)
