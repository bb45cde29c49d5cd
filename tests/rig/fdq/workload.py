"""A round of FDQ: a running bus, its client processes, and injected faults.

    with Workload(folder, seed, Settings()) as work:
        work.start()
        work.disturb(20)                # twenty faults
        work.settle()                   # producers end, all messages are acked
        verdict = work.verdict()        # of the checker

The seed decides all random choices, but not the scheduling of the operating system: the same
seed gives the same faults, not the same moments. Faults are paced by the progress of the
clients, not by time, so a slow machine has a longer round, not a different one.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

from polybus.errors import Conflict, DoesNotExist
from polybus.native import Client
from tests.rig.fdq.child_pool import ClientPool, ClientProcess
from tests.rig.fdq.clients import EXIT_CODE, GROUP, OUTPUT, TOPIC, Orders
from tests.rig.fdq.history import ACK, COMMIT, DUPLICATE, FAILED
from tests.rig.fdq.journal import UNKNOWN, Operation, operations
from tests.rig.fdq.settings import (
    KILL,
    KILL_BUS,
    KILL_PRODUCER,
    KILL_RESHARD,
    KILL_UNHEARD,
    PAUSE,
    RESHARD,
    START,
    STOP,
    TAKE_OVER,
    Settings,
)
from tests.rig.fdq.snapshot import look, outputs_of
from tests.rig.fdq.verdict import Verdict, judge
from tests.rig.held_answers import HeldAnswers
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until
from tests.rig.relay import Relay

PATIENCE_S = 150.0  # generous, because the machine may be stopped meanwhile
MOST_CONSUMERS = 5
MOST_SHARDS = 8  # of a generation
# Operations of the clients between two faults.
LEAST_DONE, MOST_DONE = 10, 200


class Workload:
    def __init__(self, folder: Path, seed: int, settings: Settings | None = None) -> None:
        self.seed = seed
        self._folder = folder
        self._settings = settings or Settings()
        self._random = Random(seed)
        self.bus = NativeBus()
        self._relay = Relay(self.bus.port) if self._settings.is_relayed else None
        self._brood = ClientPool()
        self.client: Client = self.bus.client(call_timeout_s=PATIENCE_S)
        self.producers: list[ClientProcess] = []
        self.consumers: list[ClientProcess] = []
        self.done: Counter[str] = Counter()
        self._started = 0
        self.resharded = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"seed {self.seed}; {dict(self.done)}; {self._said()}")
        self._brood.close()
        self.client.close()
        if self._relay is not None:
            self._relay.close()
        self.bus.__exit__(kind, error, trace)

    # --- clients

    def start(self) -> None:
        self.client.create_topic(TOPIC, shards=self._settings.shards)
        for number in range(self._settings.producers):
            self.produce(f"w{number}")
        for number in range(self._settings.consumers):
            self.consume(f"c{number}")

    def produce(self, name: str, **orders: Any) -> ClientProcess:
        child = self._brood.start("produce", self._orders(name, **orders))
        self.producers.append(child)
        return child

    def consume(self, name: str, **orders: Any) -> ClientProcess:
        child = self._brood.start("consume", self._orders(name, **orders))
        self.consumers.append(child)
        return child

    def _orders(self, name: str, **orders: Any) -> Orders:
        self._started += 1
        plain = Orders(
            url=self._url,
            name=f"{name}.{self._started}",
            folder=str(self._folder),
            seed=self._random.randrange(1 << 32),
            mix=self._settings.mix,
        )
        return replace(plain, **{**self._settings.orders, **orders})

    @property
    def _url(self) -> str:
        return self.bus.url if self._relay is None else f"polybus://127.0.0.1:{self._relay.port}"

    # --- faults

    def disturb(self, times: int, most_done: int = MOST_DONE) -> None:
        names, weights = list(self._settings.faults), list(self._settings.faults.values())
        for _ in range(times):
            self.go_on(self._random.randint(LEAST_DONE, most_done))
            self.do(self._random.choices(names, weights)[0])

    def do(self, name: str) -> None:
        faults: dict[str, Callable[[], None]] = {
            KILL: lambda: self._end_one(self.consumers, signal.SIGKILL),
            STOP: lambda: self._end_one(self.consumers, signal.SIGTERM),
            START: self._start_one,
            PAUSE: self._pause_one,
            KILL_BUS: self.kill_bus,
            KILL_UNHEARD: self._kill_unheard,
            KILL_PRODUCER: lambda: self._end_one(self.producers, signal.SIGKILL),
            TAKE_OVER: self._take_over,
            RESHARD: self.reshard,
            KILL_RESHARD: self._kill_reshard,
        }
        self._renew()
        self.done[name] += 1
        faults[name]()
        self._renew()

    def kill_bus(self) -> None:
        self.bus.kill()
        self.bus.start()

    def reshard(self) -> None:
        """Reshard as soon as the group has drained the last generation."""
        topic = self._random.choice((TOPIC, TOPIC, TOPIC, OUTPUT))
        if topic == OUTPUT and not outputs_of(self.client, OUTPUT):
            topic = TOPIC
        before = self.client.topic(topic)["shards"]
        shards = self._random.choice([n for n in range(1, MOST_SHARDS + 1) if n != before])

        def is_done() -> bool:
            self._staff()  # or a group that has lost most of its members drains for minutes
            try:
                self.client.reshard(topic, shards)
            except Conflict:
                return False
            return True

        until(is_done, f"{topic} is drained and resharded", PATIENCE_S)
        self.resharded += 1

    def _kill_reshard(self) -> None:
        """Kill the bus at some moment of a reshard, which the client then repeats."""
        with ThreadPoolExecutor(1) as pool:
            resharding = pool.submit(self.reshard)
            self.kill_bus()
            resharding.result(PATIENCE_S)

    def _kill_unheard(self) -> None:
        assert self._relay is not None, "answers of a bus are held back by a relay"
        answers = HeldAnswers(self._relay, self._is_one_hidden)
        while not answers.hide_one():
            self.go_on(LEAST_DONE)
        self.bus.kill()
        answers.lose()
        self.bus.start()

    def pause(self, child: ClientProcess) -> None:
        """Pause a consumer until the group continues without it, so that its calls are late."""
        child.signal(signal.SIGSTOP)
        who = child.orders.who
        until(lambda: who not in self.members(), f"{who} is missed", PATIENCE_S)
        self.go_on(LEAST_DONE)
        child.signal(signal.SIGCONT)

    def _pause_one(self) -> None:
        """Return a consumer whose name no other process uses."""
        names = [child.orders.who for child in self.consumers]
        alone = [child for child in self.consumers if names.count(child.orders.who) == 1]
        if alone:
            self.pause(self._random.choice(alone))

    def _start_one(self) -> None:
        if len(self.consumers) < MOST_CONSUMERS:
            self.consume(f"c{self._started}")

    def _end_one(self, children: list[ClientProcess], number: signal.Signals) -> None:
        child = self._random.choice(children)
        if number == signal.SIGTERM:
            self._tell_to_end(child)
        else:
            child.signal(number)
        children.remove(child)
        self._wait(child, (0, EXIT_CODE, -signal.SIGKILL))

    def _take_over(self) -> None:
        """Start a second client of a name: the older one is fenced at its next call."""
        children, start = self._random.choice(
            ((self.consumers, self.consume), (self.producers, self.produce))
        )
        child = self._random.choice(children)
        start(child.orders.who)

    def _renew(self) -> None:
        """Replace clients that have ended by themselves."""
        for children in (self.consumers, self.producers):
            for child in [one for one in children if one.has_ended]:
                children.remove(child)
                self._wait(child, (0, EXIT_CODE))
        if not self.consumers:
            self.consume(f"c{self._started}")
        if not self.producers:
            self.produce(f"w{self._started}")

    # --- progress

    def members(self) -> list[str]:
        try:
            group = self.client.act("group.info", topic=TOPIC, group=GROUP)
        except DoesNotExist:
            return []
        return [one["consumer"] for one in group["members"]]

    def lag(self) -> int:
        group = self.client.act("group.info", topic=TOPIC, group=GROUP)
        return sum(one["lag"] for one in group["shards"])

    def refused(self) -> int:
        """Return the number of acks and transactions that were refused as too late."""
        return sum(
            one.kind in (ACK, COMMIT) and (one.outcome == FAILED or bool(one.answer.get("refused")))
            for one in self._operations()
        )

    def repeated(self) -> int:
        """Return the number of transactions that were committed without a response."""
        return sum(one.kind == COMMIT and one.outcome == DUPLICATE for one in self._operations())

    def _operations(self) -> list[Operation]:
        paths = self._folder.glob("*.journal")
        return [one for path in paths for one in operations(path.stem, path)]

    def _is_one_hidden(self, since_ns: int) -> bool:
        """Return whether a transaction since then is committed and not answered."""
        begun = [
            one
            for one in self._operations()
            if one.kind == COMMIT and one.outcome == UNKNOWN and one.began_ns > since_ns
        ]
        done = {one.body for one in outputs_of(self.client, OUTPUT)} if begun else set()
        return any(done.issuperset(one.fields["outputs"]) for one in begun)

    def go_on(self, count: int) -> None:
        """Wait until the clients have made this much progress."""
        wanted = self._done() + count

        def is_there() -> bool:
            self._renew()
            return self._done() >= wanted

        until(is_there, "the clients do not go on", PATIENCE_S)

    def _done(self) -> int:
        done = b'"outcome": "ok"'
        return sum(path.read_bytes().count(done) for path in self._folder.glob("*.journal"))

    # --- the end

    def settle(self) -> None:
        """Stop the producers, wait until all messages are acked, then stop the consumers."""
        self.end(self.producers)
        until(self._has_no_delays, "delayed messages come due", PATIENCE_S)
        self._staff()
        self._quiet()
        self.end(self.consumers)

    def _has_no_delays(self) -> bool:
        return not self.client.topic(TOPIC)["delayed"]["messages"]

    def _quiet(self) -> None:
        """Wait until all messages are acked, as long as there is progress."""
        left = self.lag()
        while left:
            before = left

            def is_less(before: int = before) -> bool:
                self._staff()
                return self.lag() < before

            until(is_less, f"{before} messages are left and not acked", PATIENCE_S)
            left = self.lag()

    def _staff(self) -> None:
        """Start consumers again until there are as many as at the beginning."""
        for child in [one for one in self.consumers if one.has_ended]:
            self.consumers.remove(child)
            self._wait(child, (0, EXIT_CODE))
        while len(self.consumers) < self._settings.consumers:
            self.consume(f"c{self._started}")

    def finish(self) -> None:
        """Wait for producers with a limited number of messages."""
        for child in self.producers:
            self._wait(child, (0,))
        self.producers.clear()

    def end(self, children: list[ClientProcess]) -> None:
        for child in children:
            self._tell_to_end(child)
        for child in children:
            self._wait(child, (0, EXIT_CODE))
        children.clear()

    def _tell_to_end(self, child: ClientProcess) -> None:
        """Send the signal after the process has a journal, which means that it handles signals."""
        until(lambda: child.orders.journal.exists() or child.has_ended, "it begins", PATIENCE_S)
        child.signal(signal.SIGTERM)

    def _wait(self, child: ClientProcess, codes: tuple[int, ...]) -> None:
        until(lambda: child.has_ended, f"{child.name} ends", PATIENCE_S)
        code = child.wait()
        assert code in codes, f"{child.name} ended with {code}:\n{child.orders.log.read_text()}"

    def verdict(self) -> Verdict:
        return judge(
            self._folder,
            look(self.client, TOPIC, OUTPUT, GROUP),
            self.done,
            max_deliver=self._orders("none").max_deliver,
            is_exact=self._settings.is_exact,
        )

    def _said(self) -> str:
        logs = [path for path in sorted(self._folder.glob("*.log")) if path.stat().st_size]
        return "\n".join(f"{path.stem}: {path.read_text()[-1000:]}" for path in logs[:5])
