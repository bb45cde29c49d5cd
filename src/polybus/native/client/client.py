"""The client of a bus: over Flight, or in this process (`polybus.native.inprocess`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, cast

from polybus.errors import PeerError
from polybus.model.topic import ALL, All
from polybus.native.client.flight_transport import FlightTransport
from polybus.native.client.group_fetch import FETCH, Answer, FetchPart, split_by_shard
from polybus.native.client.native_options import DEFAULT_URL, ClientOptions, parse_url
from polybus.native.client.native_producer import FAILING_CLOSE_S, Producer
from polybus.native.client.range_reader import MAX_WAIT_S, Reading
from polybus.native.client.stage import Stage
from polybus.native.protocol import answers, requests

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.transport import Transport
    from polybus.native.protocol.fields import A, Request


class Client:
    """A client of a bus. Connects on first use. Thread-safe."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        options: ClientOptions | None = None,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        transport: Transport | None = None,
    ) -> None:
        """Without `transport` the client connects to `url`, which then is a `polybus://` URL."""
        self._connection: Transport = transport or FlightTransport(*parse_url(url, options))
        self._now_ms = now_ms
        self._lock = Lock()  # guards `_producers`
        self._producers: list[Producer] = []  # closed with the client

    # --- producing

    def producer(self, name: str | None = None, *, create: bool = True) -> Producer:
        """Open a producer. A name fences an older producer of it; without one it is new.

        Without `create` producing to a missing topic fails with `DoesNotExist`.
        """
        dense = self._connection.sends_again
        opened = self.call(requests.ProducerOpen(producer=name or "", dense=dense))
        producer = Producer(
            self._connection, opened, self._now_ms, is_named=bool(name), create=create
        )
        with self._lock:
            self._producers = [known for known in self._producers if not known.is_closed]
            self._producers.append(producer)
        return producer

    def stage(self, lease_s: float = 600.0) -> Stage:
        """Open a stage: its batches become visible together, by `publish`."""
        opened = self.call(requests.StageOpen(lease_s=lease_s))
        return Stage(self._connection, opened["stage"], self._now_ms)

    def publish(
        self, stages: Sequence[Stage | str], stamp: Mapping[str, object] | None = None
    ) -> answers.Committed:
        """Publish all batches of the stages at once. The stages are deleted."""
        names = [stage if isinstance(stage, str) else stage.name for stage in stages]
        given = None if stamp is None else dict(stamp)
        return self.call(requests.StagePublish(stages=names, stamp=given))

    # --- reading

    def read(
        self,
        topic: str,
        shard: int | str = ALL,
        start: int | None = None,
        end: int | None = None,
        *,
        max_rows: int = 0,
        wait_s: float = 0.0,
        columns: Collection[str] | None = None,
    ) -> Reading:
        """Read Arrow batches from `start` to `end` (exclusive): offsets of a shard, ids of "all".

        Without `start` the read begins at the first stored message. It ends at `end`, after
        `max_rows` (0: no limit), or after `wait_s` without messages; `math.inf` follows
        forever. With `columns` batches contain only these and the position (`offset`, or `id`
        of "all").
        """
        self._connection.check_open()
        position = "id" if shard == ALL else "offset"
        ticket = requests.ReadTicket(
            topic=topic,
            shard=cast("int | All", shard),
            start=start,
            to=end,
            max_rows=max_rows,
            columns=None if columns is None else sorted({*columns, position}),
        )
        return Reading(self._connection, ticket, wait_s)

    def wait(
        self, positions: Iterable[tuple[str, int, int]], timeout_s: float
    ) -> list[answers.ShardNews]:
        """Wait until one of (topic, shard, offset) has messages. Returns [] after the timeout."""
        wanted = [
            {"topic": topic, "shard": shard, "offset": offset} for topic, shard, offset in positions
        ]
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, min(deadline_s - time.monotonic(), MAX_WAIT_S))
            request = requests.ShardsWait(positions=wanted, timeout_ms=round(left_s * 1000))
            news = self.call(request)["news"]
            if news or time.monotonic() >= deadline_s:
                return news

    def fetch(self, **request: Any) -> tuple[Answer, list[pa.RecordBatch]]:
        """Run `group.fetch`. Returns its object and a batch per entry of "rows", in order.

        Repeats it while the bus is unreachable, because a fetch changes nothing.
        """
        given = _without_none(request)

        def fetch_once() -> tuple[Answer, list[pa.RecordBatch]]:
            answer, rows = next(self._connection.stream_fetch(given), (None, None))
            if answer is None:
                raise PeerError(f"{self._connection.url} returned no valid answer to {FETCH}")
            return answer, split_by_shard(answer, rows)

        return self._connection.retry(fetch_once)

    def follow(self, **request: Any) -> Iterator[FetchPart]:
        """Run `group.fetch` with `follow`. Yields objects, None for rows alone, and the rows."""
        return self._connection.stream_fetch(_without_none({**request, "follow": True}))

    def bounds(self, topic: str) -> answers.TopicBounds:
        return self.call(requests.BoundsGet(topic=topic))

    def find(self, topic: str, timestamp_ns: int, shard: int | str = ALL) -> int:
        """Return the first position at this time or later, the end if there is none."""
        request = requests.PositionFind(
            topic=topic, shard=cast("int | All", shard), timestamp_ns=timestamp_ns
        )
        return self.call(request)["position"]

    # --- topics

    def create_topic(
        self, topic: str, shards: int = 0, settings: Mapping[str, object] | None = None
    ) -> answers.TopicDescription:
        given = None if settings is None else dict(settings)
        return self.call(requests.TopicCreate(topic=topic, shards=shards, settings=given))

    def topics(self, pattern: str = "*") -> list[answers.TopicDescription]:
        return self.call(requests.TopicsGet(pattern=pattern))["topics"]

    def topic(self, topic: str) -> answers.TopicInfo:
        return self.call(requests.TopicGet(topic=topic))

    def configure_topic(self, topic: str, change: Mapping[str, object]) -> answers.TopicDescription:
        """Change the named settings; None restores the default of one."""
        return self.call(requests.TopicConfigure(topic=topic, change=dict(change)))

    def pause_topic(
        self, topic: str, *, produce: bool = False, consume: bool = False
    ) -> answers.TopicDescription:
        """Refuse messages for a topic, or hold back its consumers; with neither flag, both."""
        return self.call(requests.TopicPause(topic=topic, produce=produce, consume=consume))

    def resume_topic(
        self, topic: str, *, produce: bool = False, consume: bool = False
    ) -> answers.TopicDescription:
        """End a pause of a topic, or the named part of it."""
        return self.call(requests.TopicResume(topic=topic, produce=produce, consume=consume))

    def pause_group(self, topic: str, group: str) -> None:
        """Hold back the messages of a group."""
        self.call(requests.GroupPause(topic=topic, group=group))

    def resume_group(self, topic: str, group: str) -> None:
        self.call(requests.GroupResume(topic=topic, group=group))

    def reshard(self, topic: str, shards: int) -> answers.TopicDescription:
        """Change the number of shards. Raises `Conflict` while groups drain sealed shards."""
        return self.call(requests.TopicReshard(topic=topic, shards=shards))

    def drop_topic(self, topic: str) -> None:
        self.call(requests.TopicDrop(topic=topic))

    def trim(self, topic: str, before: Mapping[int, int]) -> answers.TopicBounds:
        offsets = {str(shard): offset for shard, offset in before.items()}
        return self.call(requests.TopicTrim(topic=topic, before=offsets))

    def topic_stats(self, topic: str) -> answers.TopicStats:
        return self.call(requests.TopicStatsGet(topic=topic))

    def stats(self) -> Mapping[str, Any]:
        return self.call(requests.StatsGet())

    # --- the rest

    def call(self, request: Request[A]) -> A:
        """Run the action of a request (`polybus.native.protocol.requests`)."""
        return cast("A", self.act(request.action_name, **request.encode()))

    def act(self, name: str, /, **request: Any) -> dict[str, Any]:
        """Run an action of the port by its name. Fields that are None are omitted.

        Repeats it while the bus is unreachable, up to `connect_timeout_s`.
        """
        given = _without_none(request)
        return self._connection.retry(lambda: self._connection.act_once(name, given))

    def hurry(self, timeout_s: float) -> None:
        """Limit the time to wait for an unreachable bus, also for pending calls."""
        self._connection.retry_timeout_s = min(self._connection.retry_timeout_s, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the client and its producers, each as `Producer.close` does."""
        with self._lock:
            producers, self._producers = self._producers, []
        for producer in producers:
            producer.close(timeout_s)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(None if error is None else FAILING_CLOSE_S)


def _without_none(request: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in request.items() if value is not None}
