"""A round of kills: a real bus and its clients as processes, all of which are killed with -9.

    with KillRound(folder, seed) as round:
        round.start()
        round.kill(6)                # six kills, each after some progress
        round.settle()               # all clients end and read all messages
        round.anomalies()            # the verdict

The clients' progress paces the kills, not time. Every other kill of the bus is aimed: it comes
after a message was put and before the answer to its PUT.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

from tests.rig.fdq.child_pool import ClientPool, ClientProcess
from tests.rig.fdq.journal import UNKNOWN, Operation, operations
from tests.rig.held_answers import HeldAnswers
from tests.rig.observer import until
from tests.rig.pirate.clients import WOKE, Orders
from tests.rig.pirate.lossy_round import READ_TOPICS
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.random_client import OK, PUT, SUB, UNSENT, UNSUB
from tests.rig.pirate.topic_reader import TopicReader
from tests.rig.pirate.verdict import History, Life, judge
from tests.rig.relay import Relay

CHILDREN: Final = "tests.rig.pirate.clients"
BUS, CLIENT = "the bus", "a client"
PATIENCE_S = 90.0
LEAST_DONE, MOST_DONE = 3, 60  # between one kill and the next


@dataclass
class KilledClient:
    """A client over all its restarts."""

    name: str
    records_first: bool
    child: ClientProcess | None = None
    lives: int = 0
    killed: int = 0  # lives that a kill ended; the last one may be among them


class KillRound:
    def __init__(self, folder: Path, seed: int, *, clients: int = 4) -> None:
        self.seed = seed
        self.done: Counter[str] = Counter()
        self._folder = folder
        self._random = Random(seed)
        self.bus = PirateBus()
        self._relay = Relay(self.bus.port)
        self._answers = HeldAnswers(self._relay, self._is_one_hidden)
        self.reader = TopicReader(self.bus.endpoint, READ_TOPICS)
        self._pool = ClientPool(CHILDREN)
        self._clients = [KilledClient(f"k{number}", number % 2 == 0) for number in range(clients)]
        self._killed: set[str] = set()

    def start(self) -> None:
        for client in self._clients:
            self._live(client, "work")

    def kill(self, times: int, most_done: int = MOST_DONE) -> None:
        for _ in range(times):
            self.go_on(self._random.randint(LEAST_DONE, most_done))
            if self._random.random() < 0.5:
                self._kill_bus()
            else:
                self._kill_client(self._random.choice(self._clients))

    def go_on(self, count: int) -> None:
        wanted = self._done() + count
        until(lambda: self._done() >= wanted, "the clients do not go on", PATIENCE_S)

    def settle(self) -> None:
        for client in self._clients:
            self._end(client, signal.SIGTERM)
        for client in self._clients:
            self._live(client, "drain")
        for client in self._clients:
            self._wait(client)
        self.reader.finish()

    def anomalies(self) -> list[str]:
        missing = [f"{who} was never killed" for who in (BUS, CLIENT) if not self.done[who]]
        return [*judge([self._history(one) for one in self._clients], self.reader.seen), *missing]

    def __str__(self) -> str:
        seen = sum(map(len, self.reader.seen.values()))
        return f"seed {self.seed}, killed {dict(self.done)}, {self._done()} steps, {seen} messages"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"{self}\n{self._said()}")
        self.reader.close()
        self._pool.close()
        self._relay.close()
        self.bus.__exit__(kind, error, trace)

    # --- kills

    def _kill_bus(self) -> None:
        self.done[BUS] += 1
        is_aimed = self.done[BUS] % 2
        while is_aimed and not self._answers.hide_one():
            self.go_on(LEAST_DONE)
        self.bus.kill()
        self._answers.lose()
        self.bus.start()

    def _is_one_hidden(self, since_ns: int) -> bool:
        """Return whether a later PUT has its message in the topic, and no answer."""
        there = {body for seen in self.reader.seen.values() for _, body in seen.copy()}
        return any(
            one.kind == PUT and one.outcome == UNKNOWN and one.began_ns > since_ns
            for path in self._folder.glob("*.journal")
            for one in operations(path.stem, path)
            if one.fields.get("body") in there
        )

    def _kill_client(self, client: KilledClient) -> None:
        self.done[CLIENT] += 1
        self._end(client, signal.SIGKILL)
        self._live(client, "work")

    def _live(self, client: KilledClient, act: str) -> None:
        client.lives += 1
        name = f"{client.name}.{client.lives:03}"
        seed = self._random.getrandbits(32)
        endpoint = f"tcp://127.0.0.1:{self._relay.port}"
        folder = str(self._folder)
        orders = Orders(endpoint, name, client.name, folder, seed, client.records_first)
        client.child = self._pool.start(act, orders)

    def _end(self, client: KilledClient, number: signal.Signals) -> None:
        child = client.child
        assert child is not None
        if number == signal.SIGKILL:
            self._killed.add(child.name)
        else:  # once it can receive the signal: a process with a journal can
            until(lambda: child.orders.journal.exists() or child.has_ended, "it begins", PATIENCE_S)
        child.signal(number)
        self._wait(client)

    def _wait(self, client: KilledClient) -> None:
        child = client.child
        assert child is not None
        until(lambda: child.has_ended, f"{child.name} ends", PATIENCE_S)
        code = child.wait()
        expected = (0, -signal.SIGKILL) if child.name in self._killed else (0,)
        assert code in expected, f"{child.name} ended with {code}:\n{_text(child.orders.log)}"

    def _done(self) -> int:
        done = b'"outcome"'
        return sum(path.read_bytes().count(done) for path in self._folder.glob("*.journal"))

    # --- journals

    def _history(self, client: KilledClient) -> History:
        lives: list[Life] = []
        for path in sorted(self._folder.glob(f"{client.name}.*.journal")):
            listed = operations(path.stem, path)
            woke = [one for one in listed if one.kind == WOKE]
            if woke and lives:
                lives[-1] = replace(lives[-1], operations=list(_settled(lives[-1], woke[0])))
            rest = [one for one in listed if one.kind != WOKE]
            lives.append(Life(rest, path.stem in self._killed))
        return History(client.name, lives, client.records_first)

    def _said(self) -> str:
        logs = [path for path in sorted(self._folder.glob("*.log")) if path.stat().st_size]
        return "\n".join(f"{path.stem}: {_text(path)[-1000:]}" for path in logs[:5])


def _settled(life: Life, woke: Operation) -> Iterator[Operation]:
    """The life's operations; the last, if in doubt, ended as the next life found out."""
    for one in life.operations:
        is_last = one is life.operations[-1]
        if is_last and one.outcome == UNKNOWN and one.kind in (PUT, SUB, UNSUB):
            _settle(one, **woke.fields)
        yield one


def _settle(
    one: Operation, topic: str, counter: int, value: int | None = None, error: str = ""
) -> None:
    if counter <= one.fields["counter"]:
        one.outcome = UNSENT
    elif value is not None:
        one.outcome, one.answer = OK, {"value": value}
    else:
        one.outcome = error


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
