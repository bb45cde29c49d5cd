"""Replay: read a topic again, all shards merged in id order, without a group.

    for envelope in fdq.replay("polybus://…", "orders", from_id=1000, to=2000): ...
    for envelope in fdq.replay(url, "orders", from_time=datetime(2026, 1, 31, tzinfo=UTC)): ...

A replay acks nothing and moves no group. Without `to` it ends with the last message that
exists when it begins. With `wait_s` it continues until no message has arrived for that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from polybus.dialects.fdq.client.envelope import Envelope
from polybus.errors import UsageError
from polybus.native import bus_client as buses

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native import Client, ClientOptions, Reading
    from polybus.native.protocol.answers import TopicInfo

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
    first = None if from_id is None else check_position("from_id", from_id)
    start_ns = None if from_time is None else to_nanoseconds("from_time", from_time)
    last = end_ns = None
    if to is not None:
        if from_time is not None or isinstance(to, datetime):
            end_ns = to_nanoseconds("to", to)
        else:
            last = check_position("to", to)
    bus = buses.connect(url, options)
    try:
        if start_ns is not None:
            first = bus.find(topic, start_ns)
        if end_ns is not None:
            last = bus.find(topic, end_ns)
        # Without `wait_s` the end is fixed now, or a busy topic would never end.
        if last is None and not wait_s:
            last = bus.bounds(topic)["next_id"]
        info = bus.topic(topic)
        reader = bus.read(topic, start=first, end=last, wait_s=wait_s)
        return TopicReplay(bus, reader, info, batch)
    except BaseException:
        bus.close()
        raise


class TopicReplay(Generic[T]):
    """An iterator for one thread. It disconnects at its end; `close` does so earlier."""

    def __init__(
        self,
        bus: Client,
        reader: Reading,
        topic: TopicInfo,
        as_batches: bool,
    ) -> None:
        self._bus = bus
        self._reader = reader
        self._topic: str = topic["topic"]
        self._indexes = shard_indexes(topic["generations"])
        self._items: Iterator[Any] = iter(reader)
        if not as_batches:
            self._items = chain.from_iterable(map(self.envelopes, self._items))

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
        """Return the envelopes of one batch. Columns are converted to lists once."""
        names = ("id", "shard", "offset", "timestamp_ns", "insertion_ms", "shard_key", "body")
        columns = [batch.column(name).to_pylist() for name in names]
        column = batch.column("headers")
        has_any = column.null_count < len(column)
        pairs = column.to_pylist() if has_any else repeat(None, len(column))
        headers = [dict(row or ()) for row in pairs]
        indexes = [self._indexes[shard] for shard in columns[1]]
        return map(Envelope, repeat(self._topic), *columns, headers, indexes)

    def cancel(self) -> None:
        """End the replay, from any thread."""
        self._reader.cancel()

    def close(self) -> None:
        self._items = iter(())
        self._reader.close()
        self._bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shard_indexes(generations: Sequence[int]) -> list[int]:
    """Return, for each shard, its index among the shards that were opened with it."""
    return [index for count in generations for index in range(count)]
