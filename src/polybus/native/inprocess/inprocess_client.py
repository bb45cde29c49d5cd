"""One handle on a bus inside the process, with the face of `native.Client`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polybus.errors import ConnectionLost, MalformedRequest, StoreClosed
from polybus.model.arrow import batch_of
from polybus.native.client.group_fetch import split_by_shard
from polybus.native.client.producer_set import ProducerSet
from polybus.native.client.range_reader import NO_BOUND, ReadRange
from polybus.native.inprocess.inprocess_producer import Producer
from polybus.native.inprocess.inprocess_reader import InProcessReader
from polybus.native.inprocess.inprocess_stage import InProcessStage

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.native.client.group_fetch import FetchPart
    from polybus.native.inprocess.inprocess_bus import InProcessBus


class InProcessClient:
    """Made by `open_bus`. Blocking, for any number of threads.

    Requests and answers go through JSON here, too: a program that works with a bus inside
    the process works with one behind a port.
    """

    def __init__(
        self,
        core: InProcessBus,
        leave: Callable[[], None],
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._core = core
        self._on_close = leave
        self._now_ms = now_ms
        self._lock = Lock()
        self._closed = False
        self._producers: ProducerSet[Producer] = ProducerSet()
        self._caller = core.port.new_caller(core.identity, lambda: self._closed)

    # --- producing

    def producer(self, name: str | None = None, *, create: bool = True) -> Producer:
        """A producer of this name, which fences an older one; without a name a new one.

        Its numbers may leave gaps: nothing is sent twice here, so a batch that was refused
        leaves the others alone.
        """
        opened = self.act("producer.open", producer=name or "", dense=False)
        kind = {"is_named": bool(name), "create": create}
        producer = Producer(self._core, self._caller, opened, self._now_ms, **kind)
        return self._producers.add(producer)

    def stage(self, lease_s: float = 600.0) -> InProcessStage:
        """A place for batches that become visible all at once, by `publish`."""
        opened = self.act("stage.new", lease_s=lease_s)
        return InProcessStage(self._core, self._caller, opened["stage"], self._now_ms)

    def publish(
        self, stages: Sequence[InProcessStage | str], stamp: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """All that is in the stages becomes visible, at once. They are gone then."""
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
    ) -> InProcessReader:
        """As `native.Client.read`."""
        self._check()
        wanted = ReadRange(topic, shard, start, end, max_rows, wait_s)
        return InProcessReader(self._core, wanted, self._check, lambda: self._closed)

    def fetch(self, **request: Any) -> tuple[dict[str, Any], list[pa.RecordBatch]]:
        """`group.fetch`: what it says, and a batch for each entry of its "rows", in order."""
        answer, rows = next(self._stream_fetch(request))
        assert answer is not None  # it does not follow
        return answer, split_by_shard(answer, rows)

    def follow(self, **request: Any) -> Iterator[FetchPart]:
        """`group.fetch` that goes on: what it says if that is more than rows, and the rows."""
        return self._stream_fetch({**request, "follow": True})

    def _stream_fetch(self, request: dict[str, Any]) -> Iterator[FetchPart]:
        self._check()
        for answer, rows in self._core.port.stream_fetch(self._caller, _encode_request(request)):
            self._check()
            yield answer and _round_trip_json(answer), batch_of(rows) if rows.count else None

    # --- the rest

    def act(self, name: str, /, **request: Any) -> dict[str, Any]:
        """Any action of the port, by its name; what is None is left out."""
        self._check()
        return _round_trip_json(self._core.port.act(self._caller, name, _encode_request(request)))

    def hurry(self, timeout_s: float) -> None:
        """This bus is never away."""

    def close(self, timeout_s: float | None = None) -> None:
        """Closes its producers, too, each as `Producer.close` says, and lets go who waits."""
        if os.getpid() != self._core.pid:
            return
        self._producers.close(timeout_s)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._core.port.waits.check_callers()
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self) -> None:
        core = self._core
        if os.getpid() != core.pid:
            text = f"this bus belongs to process {core.pid}, the parent of a fork: open it there"
            raise StoreClosed(text)
        if self._closed:
            raise ConnectionLost("this client was closed")


def _encode_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is None is left out."""
    try:
        return _round_trip_json({key: value for key, value in request.items() if value is not None})
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRequest(f"a request is JSON: {error}") from None


def _round_trip_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """As it would come out at the other end of a connection."""
    found: dict[str, Any] = json.loads(json.dumps(given))
    return found
