"""The client of a running bus."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polybus.native.client.flight_connection import FlightConnection
from polybus.native.client.group_fetch import Answer, FetchPart, fetch, follow
from polybus.native.client.native_options import DEFAULT_URL, ClientOptions, parse_url
from polybus.native.client.native_producer import FAILING_CLOSE_S, Producer
from polybus.native.client.producer_set import ProducerSet
from polybus.native.client.range_reader import MAX_WAIT_S, NO_BOUND, Reading, ReadRange
from polybus.native.client.stage import Stage

if TYPE_CHECKING:
    import pyarrow as pa


class Client:
    """A client of a running bus. Connects on first use. Thread-safe."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        options: ClientOptions | None = None,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._connection = FlightConnection(*parse_url(url, options))
        self._now_ms = now_ms
        self._producers: ProducerSet[Producer] = ProducerSet()

    # --- producing

    def producer(self, name: str | None = None, *, create: bool = True) -> Producer:
        """Open a producer. A name fences an older producer of it; without one it is new.

        Without `create` producing to a missing topic fails with `DoesNotExist`.
        """
        opened = self.act("producer.open", producer=name or "")
        kind = {"is_named": bool(name), "create": create}
        return self._producers.add(Producer(self._connection, opened, self._now_ms, **kind))

    def stage(self, lease_s: float = 600.0) -> Stage:
        """Open a stage: its batches become visible together, by `publish`."""
        opened = self.act("stage.new", lease_s=lease_s)
        return Stage(self._connection, opened["stage"], self._now_ms)

    def publish(
        self, stages: Sequence[Stage | str], stamp: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Publish all batches of the stages at once. The stages are deleted."""
        names = [one if isinstance(one, str) else one.name for one in stages]
        return self.act("stage.publish", stages=names, stamp=stamp and dict(stamp))

    # --- reading

    def read(
        self,
        topic: str,
        shard: int | str = "all",
        start: int | None = None,
        end: int | None = None,
        *,
        max_rows: int = NO_BOUND,
        wait_s: float = 0.0,
        columns: Collection[str] | None = None,
    ) -> Reading:
        """Read Arrow batches from `start` to `end` (exclusive): offsets of a shard, ids of "all".

        Without `start` the read begins at the first stored message. It ends at `end`, after
        `max_rows`, or after `wait_s` without messages; `math.inf` follows forever. With
        `columns` batches contain only these and the position (`offset`, or `id` of "all").
        """
        some = None if columns is None else frozenset(columns)
        return Reading(
            self._connection, ReadRange(topic, shard, start, end, max_rows, wait_s, some)
        )

    def wait(
        self, positions: Iterable[tuple[str, int, int]], timeout_s: float
    ) -> list[dict[str, Any]]:
        """Wait until one of (topic, shard, offset) has messages. Returns [] after the timeout."""
        wanted = [dict(zip(("topic", "shard", "offset"), one, strict=True)) for one in positions]
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, min(deadline_s - time.monotonic(), MAX_WAIT_S))
            answer = self.act("wait", positions=wanted, timeout_ms=round(left_s * 1000))
            if answer["news"] or time.monotonic() >= deadline_s:
                news: list[dict[str, Any]] = answer["news"]
                return news

    def fetch(self, **request: Any) -> tuple[Answer, list[pa.RecordBatch]]:
        """Run `group.fetch`. Returns its object and a batch per entry of "rows", in order."""
        return fetch(self._connection, request)

    def follow(self, **request: Any) -> Iterator[FetchPart]:
        """Run `group.fetch` with `follow`. Yields objects, None for rows alone, and the rows."""
        return follow(self._connection, {**request, "follow": True})

    def bounds(self, topic: str) -> dict[str, Any]:
        return self.act("bounds", topic=topic)

    def find(self, topic: str, timestamp_ns: int, shard: int | str = "all") -> int:
        """Return the first position at this time or later, the end if there is none."""
        found = self.act("find", topic=topic, shard=shard, timestamp_ns=timestamp_ns)
        return int(found["position"])

    # --- topics

    def create_topic(
        self, topic: str, shards: int = 0, settings: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        return self.act(
            "topic.create", topic=topic, shards=shards, settings=settings and dict(settings)
        )

    def topics(self, pattern: str = "*") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.act("topic.list", pattern=pattern)["topics"]
        return found

    def topic(self, topic: str) -> dict[str, Any]:
        return self.act("topic.info", topic=topic)

    def drop_topic(self, topic: str) -> None:
        self.act("topic.drop", topic=topic)

    def trim(self, topic: str, before: Mapping[int, int]) -> dict[str, Any]:
        offsets = {str(shard): offset for shard, offset in before.items()}
        return self.act("topic.trim", topic=topic, before=offsets)

    def topic_stats(self, topic: str) -> dict[str, Any]:
        return self.act("topic.stats", topic=topic)

    def stats(self) -> dict[str, Any]:
        return self.act("stats")

    # --- the rest

    def act(self, name: str, /, **request: Any) -> dict[str, Any]:
        """Run an action of the port by its name. Fields that are None are omitted."""
        return self._connection.act(
            name, {key: value for key, value in request.items() if value is not None}
        )

    def hurry(self, timeout_s: float) -> None:
        """Limit the time to wait for an unreachable bus, also for pending calls."""
        self._connection.retry_timeout_s = min(self._connection.retry_timeout_s, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the client and its producers, each as `Producer.close` does."""
        self._producers.close(timeout_s)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(None if error is None else FAILING_CLOSE_S)
