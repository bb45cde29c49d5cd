"""A proxy between pirate clients and their server that loses, doubles and reorders messages.

    with LossyProxy(server.endpoint, seed) as proxy:
        connect(proxy.endpoint)
        proxy.missing()            # kinds of faults that did not occur yet
        proxy.calm()               # from now on without faults

In each direction a message may be dropped, sent twice, sent late, or held until a later one
has overtaken it. Now and then a TCP relay in front of the proxy cuts or pauses all
connections. A cut also replaces one of the links to the server, and its messages are lost.
The seed decides the faults; their times depend on the machine.

    clients ── TCP relay ── ROUTER │ faults of messages │ DEALERs ── server
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count
from random import Random
from threading import Thread
from types import TracebackType
from typing import Final, Self

import zmq

from tests.rig.pirate.wire import Frames
from tests.rig.relay import Relay

TO_SERVER: Final = "to the server"
TO_CLIENT: Final = "to the client"
DIRECTIONS: Final = (TO_SERVER, TO_CLIENT)

DROPPED, DOUBLED, DELAYED, REORDERED = "dropped", "doubled", "delayed", "reordered"
CUT, STALLED = "cut", "stalled"
HARMS: Final = (DROPPED, DOUBLED, DELAYED, REORDERED)
KINDS: Final = (*(f"{harm} {way}" for harm in HARMS for way in DIRECTIONS), CUT, STALLED)

LINKS: Final = 4
LOOK_S: Final = 0.02


@dataclass(frozen=True)
class Odds:
    """Of each message; those of a cut and a stall are of each message, too."""

    dropped: float = 0.05
    doubled: float = 0.08
    delayed: float = 0.05
    reordered: float = 0.05
    cut: float = 0.006
    stalled: float = 0.006
    most_delay_s: float = 0.3
    most_held_s: float = 0.3  # a message that no other overtakes is sent then
    most_stall_s: float = 0.2


@dataclass
class Held:
    """A message that waits to be overtaken. `gone` is set when it is sent."""

    way: str
    message: Frames
    gone: bool = False


class LossyProxy:
    def __init__(self, server: str, seed: int, odds: Odds | None = None) -> None:
        self.seed = seed
        self.done: Counter[str] = Counter()
        self._odds = odds or Odds()
        self._random = Random(seed)
        self._server = server
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._links = [self._link() for _ in range(LINKS)]
        self._relay = Relay(self._front.bind_to_random_port("tcp://127.0.0.1"))
        self.endpoint = f"tcp://127.0.0.1:{self._relay.port}"
        self._later: list[tuple[float, int, Held | None]] = []
        self._order = count()
        self._held: dict[str, Held] = {}
        self._is_honest = self._stopping = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def missing(self) -> list[str]:
        """Kinds of harm that were not done: a run without one of them has shown less."""
        return [kind for kind in KINDS if not self.done[kind]]

    def calm(self) -> None:
        self._is_honest = True

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._relay.close()
        for socket in (self._front, *self._links):
            socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"seed of the proxy: {self.seed}; what it did: {dict(self.done)}")
        self.close()

    # --- one thread does it all

    def _run(self) -> None:
        while not self._stopping:
            sockets = zmq.select([self._front, *self._links], [], [], self._nap_s())[0]
            for socket in sockets:
                if socket.closed:  # by a cut in this turn; its messages are lost
                    continue
                way = TO_SERVER if socket is self._front else TO_CLIENT
                self._meet(way, socket.recv_multipart())
            self._let_go()

    def _nap_s(self) -> float:
        if not self._later:
            return LOOK_S
        return min(LOOK_S, max(0.0, self._later[0][0] - time.monotonic()))

    def _meet(self, way: str, message: Frames) -> None:
        """Draw once: a message gets one kind of fault, or none."""
        fate = "" if self._is_honest else self._fate()
        if fate in HARMS and fate != REORDERED:
            self.done[f"{fate} {way}"] += 1
        if fate == DELAYED:
            self._keep(Held(way, message), self._odds.most_delay_s)
        elif fate == REORDERED and way not in self._held:
            self._held[way] = self._keep(Held(way, message), self._odds.most_held_s)
        elif fate != DROPPED:
            self._pass(way, message, times=2 if fate == DOUBLED else 1)
        if fate == CUT:
            self._cut()
        elif fate == STALLED:
            self._stall()

    def _fate(self) -> str:
        odds = self._odds
        weights = (odds.dropped, odds.doubled, odds.delayed, odds.reordered, odds.cut, odds.stalled)
        kinds = (*HARMS, CUT, STALLED, "")
        return self._random.choices(kinds, (*weights, 1.0 - sum(weights)))[0]

    def _pass(self, way: str, message: Frames, times: int = 1) -> None:
        for _ in range(times):
            self._send(way, message)
        held = self._held.pop(way, None)
        if held is not None and not held.gone:
            self.done[f"{REORDERED} {way}"] += 1
            self._release(held)

    def _release(self, held: Held) -> None:
        held.gone = True
        if self._held.get(held.way) is held:
            del self._held[held.way]
        self._send(held.way, held.message)

    def _send(self, way: str, message: Frames) -> None:
        """Send without waiting. A message that the target cannot take is lost, too."""
        target = self._front if way == TO_CLIENT else self._links[hash(message[0]) % LINKS]
        try:
            target.send_multipart(message, zmq.DONTWAIT)
        except zmq.ZMQError:
            self.done["not taken"] += 1

    def _keep(self, held: Held, most_s: float) -> Held:
        self._at(most_s, held)
        return held

    def _at(self, most_s: float, held: Held | None) -> None:
        when = time.monotonic() + self._random.uniform(0.1, 1.0) * most_s
        heapq.heappush(self._later, (when, next(self._order), held))

    def _let_go(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            held = heapq.heappop(self._later)[2]
            if held is None:
                self._relay.release()
            elif not held.gone:
                self._release(held)

    def _cut(self) -> None:
        self.done[CUT] += 1
        self._relay.cut()
        which = self._random.randrange(LINKS)
        self._links[which].close()
        self._links[which] = self._link()

    def _stall(self) -> None:
        self.done[STALLED] += 1
        self._relay.hold()
        self._at(self._odds.most_stall_s, None)

    def _link(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._server)
        return socket
