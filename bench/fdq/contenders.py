"""What is measured: FDQ's own client in processes of its own, beside plain reads of the port."""

import time
from itertools import count

from bench.fdq.cases import BATCH_MESSAGES, PROCESSES
from bench.harness.crew import Crew
from bench.harness.load import LoadFailed
from bench.harness.results import OURS, P50, P99, RATE, Values
from bench.harness.rounds import TRIAL_S
from bench.native.contenders import Bus
from bench.store.contract import Contender
from polybus.native import Client

STALL_S = 60.0
LOOK_S = 0.01
SETTLE_S = 1.0  # messages at the pace before it counts
PACE, SECONDS = 1000, 2.0
PACED = round(PACE * SECONDS)
_numbers = count(1)


def native_url(bus: Bus) -> str:
    return bus.url.replace("grpc", "polybus")


class Produce:
    """Each process has a window of batches in flight."""

    name = OURS

    def __init__(self, bus: Bus, crew: Crew, window: int) -> None:
        self.pid, self._crew, self._window = bus.pid, crew, window
        self._batches = 4

    def calibrate(self, wanted_s: float) -> None:
        self._run()  # connects, opens producers, and makes the topic
        while (took_s := self._run()) < TRIAL_S:
            self._batches *= 4
        self._batches = max(1, round(self._batches * wanted_s / took_s))

    def measure(self) -> Values:
        seconds = self._run()
        return {RATE.key: PROCESSES * self._batches * BATCH_MESSAGES / seconds}

    def _run(self) -> float:
        return self._crew.tell(f"produce {self._batches} {BATCH_MESSAGES} {self._window}")


class Better:
    """A peer with few producers and with many: what it does better counts."""

    def __init__(self, *ways: Contender) -> None:
        self.name, self.pid = ways[0].name, ways[0].pid
        self._ways = ways

    def calibrate(self, wanted_s: float) -> None:
        for way in self._ways:
            way.calibrate(wanted_s)

    def measure(self) -> Values:
        return {RATE.key: max(way.measure()[RATE.key] for way in self._ways)}


class Alone:
    """A new group of one reads a whole topic: from joining until the bus has every ack."""

    name = OURS

    def __init__(self, bus: Bus, crew: Crew, topic: str, messages: int) -> None:
        self.pid, self._crew = bus.pid, crew
        self._url = native_url(bus)
        self._topic, self._messages = topic, messages

    def calibrate(self, wanted_s: float) -> None:
        """The topic is what it is; once through it warms all up."""
        self.measure()

    def measure(self) -> Values:
        group = f"group-{next(_numbers)}"
        with Client(self._url) as client:
            started_s = time.perf_counter()
            self._crew.tell(f"join {group} single")
            self._wait(client, group)
            seconds = time.perf_counter() - started_s
            found = sum(map(int, self._crew.ask("leave")))
            client.act("group.rm", topic=self._topic, group=group, force=True)
        if found < self._messages:
            raise LoadFailed(f"{found} messages were handled of {self._messages}")
        return {RATE.key: self._messages / seconds}

    def _wait(self, client: Client, group: str) -> None:
        deadline_s = time.monotonic() + STALL_S
        while time.monotonic() < deadline_s:
            groups = client.act("group.list", topic=self._topic)["groups"]
            if any(one["acked"] >= self._messages for one in groups if one["group"] == group):
                return
            time.sleep(LOOK_S)
        raise LoadFailed(f"not all was acked within {STALL_S:g} s")


class EndToEnd:
    """One process produces at a pace, another consumes: from before the call to the handler."""

    name = OURS

    def __init__(self, bus: Bus, topic: str, producer: Crew, listener: Crew) -> None:
        self.pid, self._url, self._topic = bus.pid, native_url(bus), topic
        self._producer, self._listener = producer, listener

    def calibrate(self, wanted_s: float) -> None:
        """Its pace and time are fixed."""
        self._producer.tell(f"pace {PACE} {SETTLE_S}")

    def measure(self) -> Values:
        group = f"latency-{next(_numbers)}"
        self._listener.ask(f"hear {group}")
        self._wait_for_shards(group)
        self._producer.tell(f"pace {PACE} {SECONDS}")
        heard, half_us, most_us = map(float, self._listener.ask(f"heard {PACED}")[0].split())
        if heard < PACED:
            raise LoadFailed(f"{heard:.0f} of {PACED} messages arrived")
        return {P50.key: half_us, P99.key: most_us}

    def _wait_for_shards(self, group: str) -> None:
        deadline_s = time.monotonic() + STALL_S
        with Client(self._url) as client:
            while time.monotonic() < deadline_s:
                shards = client.act("group.info", topic=self._topic, group=group)["shards"]
                if all(shard["owner"] for shard in shards):
                    return
                time.sleep(LOOK_S)
        raise LoadFailed(f"the listener had not all shards within {STALL_S:g} s")
