"""Clients of a ROUTER, played by the load generator in C: each has one request in flight.

A request has a number in it that rises by one each time (a PUT its counter, a GET its LAST), and
the answer has it again, so every answer is known to be the right one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness.load import Party, Plan, run
from bench.harness.results import RATE, Values
from bench.harness.rounds import TRIAL_S
from bench.peers import zmtp
from bench.store.contract import bodies
from tests.rig.pirate import wire
from tests.rig.pirate.zmtp import message

BODY = bodies(1)[0]
EPOCH = 1  # of a client that has said hello once
MARK = 0x6D61726B6D61726B  # stands for the number, to find where it is
TRIAL_TURNS = 16


@dataclass(frozen=True)
class Exchange:
    """A request of a client, by its name and a number, and the form of its answer."""

    request: Callable[[bytes, int], bytes]
    answer: Callable[[bytes], bytes]  # to a client's request with MARK
    beginning: bytes
    more: int = 0  # in the answer, than in the request

    def settings(self, client: bytes) -> dict[str, str]:
        """The same for all clients whose names are equally long."""
        answer = self.answer(client)
        at = self.request(client, MARK).index(wire.number(MARK))
        answer_at = max(0, answer.find(wire.number(MARK + self.more)))
        return {"numbered": f"{at} {len(answer)} {answer_at} {self.more}"}


def put(topic: str) -> Exchange:
    def request(client: bytes, number: int) -> bytes:
        return message(*wire.counted(wire.PUT, client, EPOCH, number, topic, BODY))

    answer = message(b"OK", wire.number(MARK), wire.number(1))
    return Exchange(request, lambda _client: answer, message(b"OK", b"")[:6])


def get(topic: str) -> Exchange:
    def request(client: bytes, number: int) -> bytes:
        return message(*wire.get(client, EPOCH, topic, number))

    answer = message(b"MSG", wire.number(MARK + 1), bytes(8), BODY)
    return Exchange(request, lambda _client: answer, message(b"MSG", b"")[:7], more=1)


def get_again(topic: str) -> Exchange:
    """The same message each time. The rising number is the counter, which a GET ignores."""

    def request(client: bytes, number: int) -> bytes:
        return message(*wire.get(client, EPOCH, topic, 0, wire.number(number)))

    answer = message(b"MSG", wire.number(1), bytes(8), BODY)
    return Exchange(request, lambda _client: answer, message(b"MSG", b"")[:7])


def echo() -> Exchange:
    """A PUT that is echoed."""
    same = put("echo").request
    return Exchange(same, lambda client: same(client, MARK), same(b"", 0)[:8])


class Clients:
    """Clients of one server; `ready` gets the highest number before each run."""

    def __init__(
        self,
        name: str,
        pid: int,
        port: int,
        clients: Sequence[bytes],
        exchange: Exchange,
        first: int = 1,
        ready: Callable[[int], None] = lambda _last: None,
    ) -> None:
        self.name, self.pid, self._port = name, pid, port
        self._clients, self._exchange = clients, exchange
        self._next, self._ready = first, ready
        self._turns = TRIAL_TURNS

    def calibrate(self, wanted_s: float) -> None:
        while (took_s := self._run()) < TRIAL_S:
            self._turns *= 4
        self._turns = max(TRIAL_TURNS, round(self._turns * wanted_s / took_s))

    def measure(self) -> Values:
        seconds = self._run()
        return {RATE.key: len(self._clients) * self._turns / seconds}

    def do(self, turns: int) -> int:
        """Run this many turns without measuring. Returns the number of requests."""
        self._turns = turns
        self._run()
        return len(self._clients) * turns

    def _run(self) -> float:
        first, self._next = self._next, self._next + self._turns
        self._ready(self._next)
        plan = Plan(
            "numbered",
            tuple(
                Party(self._port, zmtp.hello(), self._exchange.request(client, first))
                for client in self._clients
            ),
            (),
            beginning=self._exchange.beginning,
            settings=self._exchange.settings(self._clients[0]),
        )
        seconds: float = run(plan, self._turns)["seconds"]
        return seconds
