"""Replay: a topic read again, all shards in the order of their ids, without any group.

    for envelope in fdq.replay("polybus://…", "orders", from_id=1000, to=2000): ...
    for envelope in fdq.replay(url, "orders", from_time=datetime(2026, 1, 31, tzinfo=UTC)): ...

Nothing is acked and nobody's position moves. Without `to` it ends with the last message
that is there when it begins; with `wait_s` it goes on until nothing came for so long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from polybus.dialects.fdq.client.envelope import Envelope
from polybus.dialects.fdq.client.time_position import check_position, to_nanoseconds
from polybus.errors import UsageError
from polybus.native import bus_client as buses

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native import ClientOptions

T = TypeVar("T")
Moment = int | datetime  # of the bus's clock; an int is nanoseconds since 1970


@overload
def replay(
    url: str | None,
    topic: str,
    *,
    from_id: int | None = None,
    from_time: Moment | None = None,
    to: int | datetime | None = None,
    batch: Literal[False] = False,
    wait_s: float = 0.0,
    options: ClientOptions | None = None,
) -> Replay[Envelope]: ...


@overload
def replay(
    url: str | None,
    topic: str,
    *,
    from_id: int | None = None,
    from_time: Moment | None = None,
    to: int | datetime | None = None,
    batch: Literal[True],
    wait_s: float = 0.0,
    options: ClientOptions | None = None,
) -> Replay[pa.RecordBatch]: ...


def replay(
    url: str | None,
    topic: str,
    *,
    from_id: int | None = None,
    from_time: Moment | None = None,
    to: int | datetime | None = None,
    batch: bool = False,
    wait_s: float = 0.0,
    options: ClientOptions | None = None,
) -> Any:
    """Envelopes, or Arrow batches, from a place to another (exclusive), in id order.

    Without `from_…` from the first there is. `to` is a time if it is a datetime or stands
    beside `from_time`, else an id. Times are the bus's, those of `timestamp_ns`.
    """
    if from_id is not None and from_time is not None:
        raise UsageError("from_id and from_time exclude each other: give one")
    if not wait_s >= 0:
        raise UsageError("wait_s is 0 or more")
    start = (
        _check_id("from_id", from_id) if from_time is None else _check_time("from_time", from_time)
    )
    is_time = from_time is not None or isinstance(to, datetime)
    end = _check_time("to", to) if is_time and to is not None else _check_id("to", to)
    bus = buses.connect(url, options)
    try:
        return _open_replay(bus, topic, start, end, batch, wait_s)
    except BaseException:
        bus.close()
        raise


class TimePosition(int):
    """A time, nanoseconds since 1970."""


class Replay(Generic[T]):
    """An iterator, for one thread. It lets go of the bus at its end; `close` does so before."""

    def __init__(
        self,
        bus: buses.BusClient,
        reading: buses.RowReader,
        topic: dict[str, Any],
        as_batches: bool,
    ) -> None:
        self._bus = bus
        self._reading = reading
        self._topic: str = topic["topic"]
        self._indexes = shard_indexes(topic["generations"])
        self._items: Iterator[Any] = iter(reading) if as_batches else self._envelopes()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            item: T = next(self._items)
            return item
        except BaseException:
            self.close()
            raise

    def envelopes(self, batch: pa.RecordBatch) -> Iterator[Envelope]:
        """Those of one batch."""
        return envelopes_of(self._topic, batch, self._indexes)

    def cancel(self) -> None:
        """Ends it, from any thread."""
        self._reading.cancel()

    def close(self) -> None:
        self._items = iter(())
        self._reading.close()
        self._bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _envelopes(self) -> Iterator[Envelope]:
        for batch in self._reading:
            yield from self.envelopes(batch)


def _open_replay(
    bus: buses.BusClient, topic: str, start: int | None, end: int | None, batch: bool, wait_s: float
) -> Replay[Any]:
    first, last = _find_id(bus, topic, start), _find_id(bus, topic, end)
    if last is None and not wait_s:
        last = bus.act("bounds", topic=topic)["next_id"]
    info = bus.act("topic.info", topic=topic)
    reading = bus.read(topic, start=first, end=last, wait_s=wait_s)
    return Replay(bus, reading, info, batch)


def _find_id(bus: buses.BusClient, topic: str, place: int | None) -> int | None:
    """The id that a place stands for."""
    if not isinstance(place, TimePosition):
        return place
    return int(bus.act("find", topic=topic, timestamp_ns=int(place))["position"])


def envelopes_of(topic: str, batch: pa.RecordBatch, indexes: Sequence[int]) -> Iterator[Envelope]:
    """One for each row; the columns become lists once."""
    names = ("id", "shard", "offset", "timestamp_ns", "insertion_ms", "shard_key", "body")
    ids, shards, *rest = [batch.column(name).to_pylist() for name in names]
    columns = ids, shards, *rest, headers_of(batch), [indexes[shard] for shard in shards]
    return map(Envelope, repeat(topic), *columns)


def headers_of(batch: pa.RecordBatch) -> list[dict[str, bytes]]:
    column = batch.column("headers")
    if column.null_count == len(column):
        return [{} for _ in range(len(column))]
    return [dict(one or ()) for one in column.to_pylist()]


def shard_indexes(generations: Sequence[int]) -> list[int]:
    """For each shard, where it stands among those that were opened with it."""
    return [index for count in generations for index in range(count)]


def _check_time(name: str, given: object) -> TimePosition:
    return TimePosition(to_nanoseconds(name, given))


def _check_id(name: str, given: object) -> int | None:
    return None if given is None else check_position(name, given)
