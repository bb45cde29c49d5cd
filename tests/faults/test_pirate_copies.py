"""Concurrent copies of requests on several connections are executed once.

Clients send their next few requests without waiting, every one of them up to four times, on
whichever connection, nearly in order. All answers to one request are the same, but for copies
that come when a later counter is used up: those are STALE.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest

from tests.rig.pirate import wire
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.wire import PUT, SUB, UNSUB, Answer, Frames
from tests.rig.pirate.zmq_client import Bare

ROUNDS, CONNECTIONS = 12, 4
CLIENTS = (b"a", b"b", b"c")
STALE = wire.error("STALE")


def requests(chance: Random, counters: dict[bytes, int]) -> Iterator[Frames]:
    """Yield the clients' next requests, each one to four times."""
    for client in CLIENTS:
        for _ in range(chance.randint(1, 4)):
            counters[client] += chance.choice((1, 1, 2))
            op = chance.choice((PUT, PUT, PUT, SUB, UNSUB))
            body = [b"%b %d" % (client, counters[client])] if op == PUT else []
            topic = chance.choice(("kept", "kept", "fleeting"))
            request = wire.counted(op, client, 1, counters[client], topic, *body)
            yield from [request] * chance.randint(1, 4)


def nearly_in_order(chance: Random, wanted: list[Frames]) -> list[Frames]:
    places = sorted(range(len(wanted)), key=lambda at: at + chance.uniform(0, 3))
    return [wanted[at] for at in places]


def answers_to(chance: Random, peers: list[Bare], wanted: list[Frames]) -> Iterator[Answer]:
    """Send all requests, then read the answers. Returns them in the order of the requests."""
    sent = [chance.choice(peers) for _ in wanted]
    for number, (peer, request) in enumerate(zip(sent, wanted, strict=True)):
        peer.send([wire.number(number), b"", *request])
    got = {}
    for peer in sent:
        message = peer.receive(30.0)
        assert message is not None, "no answer"
        got[wire.value(message[0])] = wire.read_answer(message[2:])
    return (got[number] for number in range(len(wanted)))


@pytest.mark.sabotage("stamps-off", "replies-off", expects="was answered by")
def test_concurrent_copies_of_a_request_are_executed_once():
    seed = random.getrandbits(32)
    chance = Random(seed)
    answers_by_request: dict[tuple[bytes, ...], set[Answer]] = defaultdict(set)
    with ExitStack() as stack:
        bus = stack.enter_context(PirateBus())
        reader, *peers = (
            stack.enter_context(Bare(bus.endpoint, b"reader")) for _ in range(CONNECTIONS + 1)
        )
        reader.hello()
        reader.sub("kept")
        for client in CLIENTS:
            reader.ask(wire.hello(client, 1))
        counters = dict.fromkeys(CLIENTS, 0)
        for _ in range(ROUNDS):
            wanted = nearly_in_order(chance, list(requests(chance, counters)))
            for request, answer in zip(wanted, answers_to(chance, peers, wanted), strict=True):
                answers_by_request[tuple(request)].add(answer)
        stored = list(iter(lambda: reader.get("kept"), wire.NONE))
    check(answers_by_request, stored, f"seed {seed}")


def check(
    answers_by_request: dict[tuple[bytes, ...], set[Answer]], stored: list[Answer], seed: str
) -> None:
    done = {}
    for request, answers in answers_by_request.items():
        real = answers - {STALE}
        assert len(real) <= 1, f"{seed}: {request[1:6]} was answered by {answers}"
        for word, *rest in real:
            if word == "OK" and request[1] == PUT and request[5] == b"kept":
                done[rest[1]] = request[6]
    assert {one[1]: one[2] for one in stored} == done, seed
    assert len(stored) == len(done), seed
