"""Publishing many staged bytes at once, while another thread commits one message after another."""

import threading
import time
from statistics import median, quantiles

from bench.harness.results import Values
from bench.store.producers import Batch, Crowd
from polybus.model.commit import Append, Commit
from polybus.model.topic import Topic
from polybus.store.contract import Store

STAGES = 16
BLOCK_MESSAGES = 7000  # about a megabyte
AROUND_S = 0.5  # before and after, in which the others are measured as well


class Other:
    """Commits one message after the other, and notes when each began and ended."""

    def __init__(self, store: Store, topic: Topic) -> None:
        self._crowd = Crowd(store, topic, 1, Batch(1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.spans: list[tuple[float, float]] = []

    def _work(self) -> None:
        while not self._stop.is_set():
            began_s = time.perf_counter()
            self._crowd.run(1)
            self.spans.append((began_s, time.perf_counter()))

    def __enter__(self) -> "Other":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def longest_ms(self, from_s: float, to_s: float) -> float:
        """Return the longest latency of the commits that overlap a time span."""
        meanwhile = (end - began for began, end in self.spans if end >= from_s and began <= to_s)
        return max(meanwhile, default=0.0) * 1e3

    def all_ms(self) -> list[float]:
        return [(end - began) * 1e3 for began, end in self.spans]


def _staged(store: Store, topic: Topic, size: int) -> tuple[str, ...]:
    stages = tuple(store.open_stage() for _ in range(STAGES))
    batch = Batch(BLOCK_MESSAGES)
    block = batch.block(time.time_ns() // 1_000_000)
    for stage in stages:
        count = max(1, round(size / STAGES / block.size_bytes))
        futures = [store.stage(stage, [Append(topic.number, 0, block)]) for _ in range(count)]
        for future in futures:
            future.result()
    return stages


def publish(store: Store, topic: Topic, size: int) -> Values:
    """Return the time of a publication, and the waits of other commits meanwhile."""
    stages = _staged(store, topic, size)
    beside = store.create("beside", 1, {})
    with Other(store, beside) as other:
        time.sleep(AROUND_S)
        began_s = time.perf_counter()
        store.commit(Commit(stages=stages)).result()
        ended_s = time.perf_counter()
        time.sleep(AROUND_S)
    waits_ms = other.all_ms()
    return {
        "publish_ms": (ended_s - began_s) * 1e3,
        "others_longest_ms": other.longest_ms(began_s, ended_s),
        "others_p50_ms": median(waits_ms),
        "others_p99_ms": quantiles(waits_ms, n=100)[98],
    }
