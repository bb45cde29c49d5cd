"""What is measured, and what must hold.

- PUT, answered after fsync, 64 clients: at least 0.6 of the smaller of what the store does alone
  with 64 waiting commits, and what a bare ROUTER echoes
- GET of stored messages, 64 clients that read on, and one that gets the same message again: at
  least 0.5 of the round trips of a bare ROUTER
- memory is flat with 10,000 subscriptions
- one client that reads on has no target: it has one round trip at a time
- PUT while everything is collected: no slower than while nothing is (0.9: it is a ratio of two
  measurements of the same thing)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.harness.results import OURS, RATE, CaseResult, Requirement, Target, Verdict
from bench.peers import router
from bench.store.rounds import Case

CLIENTS = 64
STORE, HELD = "store alone", "nothing collected"

PUT = Case("pirate-put", "PUT after fsync, 64 clients, 128 B", (RATE,))
GET = Case("pirate-get", "GET, 64 clients that read on, 128 B", (RATE,))
GET_SAME = Case("pirate-get-same", "GET of one message again, one client, 128 B", (RATE,))
GET_ALONE = Case("pirate-get-alone", "GET, one client that reads on, 128 B", (RATE,))
COLLECT = Case("pirate-collect", "PUT while all is collected, 64 clients, 128 B", (RATE,))
CASES = (PUT, GET, GET_SAME, GET_ALONE, COLLECT)


@dataclass(frozen=True)
class OfTheSmaller:
    """Our rate is at least so many times the smaller of theirs, round by round."""

    case: str
    against: tuple[str, ...]
    at_least: float

    def judge(self, results: Sequence[CaseResult]) -> list[Verdict]:
        return [self._verdict(one) for one in results if one.name == self.case]

    def _verdict(self, result: CaseResult) -> Verdict:
        wanted = (OURS, *self.against)
        whole = [one for one in result.rounds if all(name in one for name in wanted)]
        ratios = [
            one[OURS][RATE.key] / min(one[name][RATE.key] for name in self.against) for one in whole
        ]
        reached = median(ratios) if ratios else None
        text = f"{result.title}: times the smaller of {' and '.join(self.against)}"
        holds = reached is not None and reached >= self.at_least
        return Verdict(text, f"at least {self.at_least:g}", reached, holds)


REQUIREMENTS: tuple[Requirement, ...] = (
    OfTheSmaller(PUT.name, (STORE, router.NAME), 0.6),
    Target(GET.name, RATE, (router.NAME,), 0.5),
    Target(GET_SAME.name, RATE, (router.NAME,), 0.5),
    Target(COLLECT.name, RATE, (HELD,), 0.9),
)
