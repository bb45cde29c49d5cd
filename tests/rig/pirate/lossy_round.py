"""Several clients at sea: they work through a lossy proxy until all harm has been done.

    with Voyage(folder, server_endpoint, seed, talker) as voyage:
        voyage.sail(least_steps=50)
        voyage.land()                 # an honest line again: all is read
        voyage.anomalies()            # the verdict

Topics that the witness reads exist all the time. The last one has no witness: it comes and
goes with its subscribers, and only the answers of its readers can be compared.
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
from tests.rig.pirate.random_client import Sailor, Talker
from tests.rig.pirate.topic_reader import Witness
from tests.rig.pirate.verdict import History, Life, judge

WITNESSED = ("orders", "bills")
FLEETING = "fleeting"
TOPICS = (*WITNESSED, FLEETING)
PATIENCE_S = 120.0


class ClosableTalker(Talker, Protocol):
    def close(self) -> None: ...


MakeTalker = Callable[[str, str], ClosableTalker]  # of an endpoint and a name


class Voyage:
    def __init__(
        self,
        folder: Path,
        server: str,
        seed: int,
        talker: MakeTalker,
        *,
        sailors: int = 4,
        odds: Odds | None = None,
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._talker = talker
        self.witness = Witness(server, WITNESSED)
        self.proxy = LossyProxy(server, seed, odds)
        self._names = [f"s{number}" for number in range(sailors)]
        self._steps = dict.fromkeys(self._names, 0)
        self._failures: list[BaseException] = []
        self._ending = False
        self._all_ended = Barrier(sailors)
        self._threads = [
            Thread(target=self._live, args=(name,), daemon=True) for name in self._names
        ]

    def sail(self, least_steps: int, most_steps: int = 10_000) -> None:
        """Until each has done so much, and each kind of harm was done to them."""
        for thread in self._threads:
            thread.start()

        def is_enough() -> bool:
            least = min(self._steps.values())
            enough = least >= least_steps and not self.proxy.missing()
            return enough or least >= most_steps or bool(self._failures)

        while not is_enough():  # however long it takes, as long as they go on
            self._wait_for_steps(sum(self._steps.values()))

    def _wait_for_steps(self, before: int) -> None:
        until(
            lambda: self._failures or sum(self._steps.values()) > before,
            "the clients do not go on",
            PATIENCE_S,
        )

    def land(self) -> None:
        """The proxy loses no more messages; all clients read to the end."""
        self.proxy.calm()
        self._ending = True
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._check_failures()
        self.witness.finish()

    def anomalies(self) -> list[str]:
        """With harm that was not done among them: then less was shown than it seems."""
        histories = [
            History(name, [Life(operations(name, self._diary(name)))]) for name in self._names
        ]
        missing = [f"nothing was {kind}" for kind in self.proxy.missing()]
        return [*judge(histories, self.witness.seen), *missing]

    def __str__(self) -> str:
        seen = sum(map(len, self.witness.seen.values()))
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
        self.witness.close()
        self._ending = True
        self.proxy.close()

    def _diary(self, name: str) -> Path:
        return self._folder / f"{name}.diary"

    def _live(self, name: str) -> None:
        try:
            with (
                closing(self._talker(self.proxy.endpoint, name)) as talker,
                closing(Journal(self._diary(name))) as diary,
            ):
                seed = Random(f"{self._seed} {name}").getrandbits(32)
                sailor = Sailor(name, talker, diary, seed, TOPICS)
                while not self._ending:
                    sailor.step()
                    self._steps[name] += 1
                self._all_ended.wait(PATIENCE_S)  # what is read to the end grows no more
                sailor.drain()
        except BaseException as error:
            self._failures.append(error)
            self._all_ended.abort()

    def _check_failures(self) -> None:
        if self._failures:
            raise self._failures[0]
