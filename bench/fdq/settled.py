"""A group whose consumers have their shards, when many messages become visible at once.

They are staged first and published in one step, so no reader sees them early: what is measured
is consuming, not joining, and not producing. The clock runs from the answer to that step until the
bus has every ack.
"""

import itertools
import time
from collections.abc import Callable

import pyarrow as pa

from bench.fdq.cases import BATCH_MESSAGES, KEYS, PLAIN, PROCESSES
from bench.fdq.contenders import LOOK_S, STALL_S, native_url
from bench.harness.crew import Crew
from bench.harness.load import LoadFailed
from bench.harness.results import OURS, RATE, Values
from bench.native.contenders import Bus
from bench.store.contract import bodies
from polybus.native import Client

GROUP = "settled"


def _batch() -> pa.RecordBatch:
    keys = itertools.islice(itertools.cycle(range(KEYS)), BATCH_MESSAGES)
    columns = [
        pa.array([f"customer-{at}" for at in keys], pa.utf8()),
        pa.array(bodies(BATCH_MESSAGES), pa.binary()),
    ]
    return pa.record_batch(columns, names=["shard_key", "body"])


class Settled:
    name = OURS

    def __init__(self, bus: Bus, crew: Crew, topic: str, messages: int) -> None:
        self.pid, self._url, self._crew = bus.pid, native_url(bus), crew
        self._topic, self._messages = topic, messages
        self.total = 0  # that are in the topic

    def calibrate(self, wanted_s: float) -> None:
        with Client(self._url) as client:
            client.create_topic(self._topic)
            self._crew.tell(f"join {GROUP} batch")
            self._until(lambda: self._is_settled(client), "the shards were not shared")
        self.measure()  # which warms all up

    def measure(self) -> Values:
        with Client(self._url) as client:
            stage = self._staged(client)
            client.publish([stage])
            started_s = time.perf_counter()
            self.total += self._messages
            self._until(lambda: self._acked(client) >= self.total, "not all was acked")
            return {RATE.key: self._messages / (time.perf_counter() - started_s)}

    def _staged(self, client: Client) -> str:
        batch = _batch()
        with client.stage() as stage:
            for _ in range(self._messages // BATCH_MESSAGES):
                stage.put_rows_nowait(self._topic, batch)
            stage.flush()
            return stage.name

    def _is_settled(self, client: Client) -> bool:
        info = client.act("group.info", topic=self._topic, group=GROUP)
        shares = [len(one["shards"]) for one in info["members"]]
        return len(shares) == PROCESSES and sum(shares) == len(info["shards"]) and min(shares) > 0

    def _acked(self, client: Client) -> int:
        groups = client.act("group.list", topic=self._topic)["groups"]
        return sum(int(one["acked"]) for one in groups)

    def _until(self, done: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + STALL_S
        while not done():
            if time.monotonic() > deadline_s:
                raise LoadFailed(f"{otherwise} within {STALL_S:g} s")
            time.sleep(LOOK_S)


class PlainRead:
    """As many processes read the whole topic, each its share of the shards."""

    name = PLAIN

    def __init__(self, bus: Bus, crew: Crew, beside: Settled) -> None:
        self.pid, self._crew, self._beside = bus.pid, crew, beside

    def calibrate(self, wanted_s: float) -> None:
        self.measure()

    def measure(self) -> Values:
        started_s = time.perf_counter()
        found = sum(map(int, self._crew.ask(f"read {PROCESSES}")))
        seconds = time.perf_counter() - started_s
        if found != self._beside.total:
            raise LoadFailed(f"{found} messages were read of {self._beside.total}")
        return {RATE.key: found / seconds}
