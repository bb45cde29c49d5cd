"""A round of several clients behind a lossy proxy, until each kind of fault has happened.

    with LossyRound(folder, server_endpoint, seed, open_client) as lossy_round:
        lossy_round.run(least_steps=50)
        lossy_round.finish()          # without losses: all clients read to the end
        lossy_round.anomalies()       # the verdict

Topics of the topic reader exist all the time. The last topic has none: it exists while it
has subscribers, and only the answers of its subscribers can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from threading import Barrier, Thread
from types import TracebackType
from typing import Protocol, Self

from tests.rig.fdq.journal import Journal, operations
from tests.rig.observer import until
from tests.rig.pirate.lossy_proxy import LossyProxy, Odds
from tests.rig.pirate.random_client import RandomClient, RequestClient
from tests.rig.pirate.topic_reader import TopicReader
from tests.rig.pirate.verdict import History, Life, judge

READ_TOPICS = ("orders", "bills")
FLEETING = "fleeting"
TOPICS = (*READ_TOPICS, FLEETING)
PATIENCE_S = 120.0


class ClosableClient(RequestClient, Protocol):
    def close(self) -> None: ...


OpenClient = Callable[[str, str], ClosableClient]  # of an endpoint and a name


class LossyRound:
    def __init__(
        self,
        folder: Path,
        server: str,
        seed: int,
        open_client: OpenClient,
        *,
        clients: int = 4,
        odds: Odds | None = None,
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._open_client = open_client
        self.reader = TopicReader(server, READ_TOPICS)
        self.proxy = LossyProxy(server, seed, odds)
        self._names = [f"s{number}" for number in range(clients)]
        self._steps = dict.fromkeys(self._names, 0)
        self._failures: list[BaseException] = []
        self._ending = False
        self._all_ended = Barrier(clients)
        self._threads = [
            Thread(target=self._live, args=(name,), daemon=True) for name in self._names
        ]

    def run(self, least_steps: int, most_steps: int = 10_000) -> None:
        """Run until each client has made `least_steps` and each kind of fault has happened."""
        for thread in self._threads:
            thread.start()

        def is_enough() -> bool:
            least = min(self._steps.values())
            enough = least >= least_steps and not self.proxy.missing()
            return enough or least >= most_steps or bool(self._failures)

        while not is_enough():  # without a deadline, as long as they continue
            self._wait_for_steps(sum(self._steps.values()))

    def _wait_for_steps(self, before: int) -> None:
        until(
            lambda: self._failures or sum(self._steps.values()) > before,
            "the clients do not go on",
            PATIENCE_S,
        )

    def finish(self) -> None:
        """End the faults, then let all clients read to the end."""
        self.proxy.calm()
        self._ending = True
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._check_failures()
        self.reader.finish()

    def anomalies(self) -> list[str]:
        """Return all anomalies. A fault that did not happen is one, because it was not tested."""
        histories = [
            History(name, [Life(operations(name, self._journal(name)))]) for name in self._names
        ]
        missing = [f"nothing was {kind}" for kind in self.proxy.missing()]
        return [*judge(histories, self.reader.seen), *missing]

    def __str__(self) -> str:
        seen = sum(map(len, self.reader.seen.values()))
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(self.proxy.done.items()))
        return f"seed {self._seed}, {sum(self._steps.values())} steps, {seen} messages; {done}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(str(self))
        self.reader.close()
        self._ending = True
        self.proxy.close()

    def _journal(self, name: str) -> Path:
        return self._folder / f"{name}.journal"

    def _live(self, name: str) -> None:
        try:
            with (
                closing(self._open_client(self.proxy.endpoint, name)) as client,
                closing(Journal(self._journal(name))) as journal,
            ):
                seed = Random(f"{self._seed} {name}").getrandbits(32)
                random_client = RandomClient(name, client, journal, seed, TOPICS)
                while not self._ending:
                    random_client.step()
                    self._steps[name] += 1
                self._all_ended.wait(PATIENCE_S)  # no client puts messages after this
                random_client.drain()
        except BaseException as error:
            self._failures.append(error)
            self._all_ended.abort()

    def _check_failures(self) -> None:
        if self._failures:
            raise self._failures[0]
