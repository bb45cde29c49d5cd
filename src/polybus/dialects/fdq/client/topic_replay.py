"""Replay: read a topic again, all shards merged in id order, without a group.

    for envelope in fdq.replay("polybus://…", "orders", from_id=1000, to=2000): ...
    for envelope in fdq.replay(url, "orders", from_time=datetime(2026, 1, 31, tzinfo=UTC)): ...

A replay acks nothing and moves no group. Without `to` it ends with the last message that
exists when it begins. With `wait_s` it continues until no message has arrived for that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from polybus.dialects.fdq.client.envelope import Envelope
from polybus.errors import UsageError
from polybus.native import bus_client as buses

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native import ClientOptions

MAX_POSITION = 2**63 - 1
NS_PER_US = 1000


def check_position(name: str, value: object) -> int:
    """Check an id, an offset, or nanoseconds since 1970. Raises `UsageError`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_POSITION:
        raise UsageError(f"{name} must be an integer >= 0, got {value!r}")
    return value


def to_nanoseconds(name: str, moment: object) -> int:
    """Convert a time of the bus's clock. An int is nanoseconds since 1970 already."""
    if not isinstance(moment, datetime):
        return check_position(name, moment)
    if moment.tzinfo is None:
        raise UsageError(f"{name} must be a time with a zone, such as datetime.now(UTC)")
    since = moment - datetime.fromtimestamp(0, moment.tzinfo)
    return check_position(name, since // timedelta(microseconds=1) * NS_PER_US)


T = TypeVar("T")
Moment = int | datetime  # by the clock of the bus; an int is nanoseconds since 1970


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
) -> TopicReplay[Envelope]: ...


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
) -> TopicReplay[pa.RecordBatch]: ...


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
    """Iterate over envelopes, or Arrow batches, from one position to another, in id order.

    It starts with the first message unless `from_id` or `from_time` is given. `to` is
    exclusive; it is a time if it is a datetime or `from_time` is given, else an id. Times are
    those of `timestamp_ns`, by the clock of the bus.
    """
    if from_id is not None and from_time is not None:
        raise UsageError("from_id and from_time must not be given together")
    if not wait_s >= 0:
        raise UsageError(f"wait_s must be at least 0, got {wait_s!r}")
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


class TopicReplay(Generic[T]):
    """An iterator for one thread. It disconnects at its end; `close` does so earlier."""

    def __init__(
        self,
        bus: buses.BusClient,
        reader: buses.RowReader,
        topic: dict[str, Any],
        as_batches: bool,
    ) -> None:
        self._bus = bus
        self._reader = reader
        self._topic: str = topic["topic"]
        self._indexes = shard_indexes(topic["generations"])
        self._items: Iterator[Any] = iter(reader) if as_batches else self._envelopes()

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
        """Return the envelopes of one batch."""
        return envelopes_of(self._topic, batch, self._indexes)

    def cancel(self) -> None:
        """End the replay, from any thread."""
        self._reader.cancel()

    def close(self) -> None:
        self._items = iter(())
        self._reader.close()
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
        for batch in self._reader:
            yield from self.envelopes(batch)


def _open_replay(
    bus: buses.BusClient, topic: str, start: int | None, end: int | None, batch: bool, wait_s: float
) -> TopicReplay[Any]:
    first, last = _find_id(bus, topic, start), _find_id(bus, topic, end)
    if last is None and not wait_s:
        last = bus.act("bounds", topic=topic)["next_id"]
    info = bus.act("topic.info", topic=topic)
    reader = bus.read(topic, start=first, end=last, wait_s=wait_s)
    return TopicReplay(bus, reader, info, batch)


def _find_id(bus: buses.BusClient, topic: str, position: int | None) -> int | None:
    """Return the id of a position; a time is looked up."""
    if not isinstance(position, TimePosition):
        return position
    return int(bus.act("find", topic=topic, timestamp_ns=int(position))["position"])


def envelopes_of(topic: str, batch: pa.RecordBatch, indexes: Sequence[int]) -> Iterator[Envelope]:
    """Return an envelope per row. Columns are converted to lists once."""
    names = ("id", "shard", "offset", "timestamp_ns", "insertion_ms", "shard_key", "body")
    ids, shards, *rest = [batch.column(name).to_pylist() for name in names]
    columns = ids, shards, *rest, headers_of(batch), [indexes[shard] for shard in shards]
    return map(Envelope, repeat(topic), *columns)


def headers_of(batch: pa.RecordBatch) -> list[dict[str, bytes]]:
    column = batch.column("headers")
    if column.null_count == len(column):
        return [{} for _ in range(len(column))]
    return [dict(pairs or ()) for pairs in column.to_pylist()]


def shard_indexes(generations: Sequence[int]) -> list[int]:
    """Return, for each shard, its index among the shards that were opened with it."""
    return [index for count in generations for index in range(count)]


def _check_time(name: str, value: object) -> TimePosition:
    return TimePosition(to_nanoseconds(name, value))


def _check_id(name: str, value: object) -> int | None:
    return None if value is None else check_position(name, value)
