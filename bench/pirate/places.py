"""A bus with a pirate listener, its clients and subscriptions before a measurement."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

from bench.harness.load import LoadFailed
from bench.harness.places import installed
from bench.native.contenders import Bus, bus
from bench.pirate.clients import BODY, EPOCH
from tests.rig.pirate import wire
from tests.rig.pirate.zmq_client import Bare

LISTEN = "pirate=tcp://127.0.0.1:0"
COLLECT_S = 0.05
AT_ONCE, STALL_S = 64, 15.0


@contextmanager
def pirate_bus(folder: Path) -> Iterator[Bus]:
    polybus = str(installed("polybus", "make setup"))
    data = ("serve", "--data", str(folder / "data"))
    with bus("pirate", folder, polybus, *data, others=[LISTEN]) as ours:
        yield ours


def endpoint(bus: Bus) -> str:
    return f"tcp://127.0.0.1:{bus.ports['pirate']}"


def greet(bus: Bus, clients: Sequence[bytes]) -> None:
    _demand(bus, [wire.hello(client, 1) for client in clients])


def subscribe(bus: Bus, clients: Sequence[bytes], topic: str, counter: int = 1) -> None:
    """Subscribe clients to a topic, each with this counter."""
    greet(bus, clients)
    _demand(bus, [wire.counted(wire.SUB, one, EPOCH, counter, topic) for one in clients])


def _demand(bus: Bus, requests: Sequence[wire.Frames]) -> None:
    """Execute all requests, at most AT_ONCE in flight."""
    with Bare(endpoint(bus), b"") as bare:
        for number, request in enumerate(requests):
            bare.send([b"", *request])
            if number >= AT_ONCE:
                _check(bare.receive(STALL_S))
        for _ in requests[:AT_ONCE]:
            _check(bare.receive(STALL_S))


def _check(message: wire.Frames | None) -> None:
    if message is None or wire.read_answer(message[1:])[0] != "OK":
        raise LoadFailed(f"preparing a measurement failed: the bus answered {message}")


class Collecting:
    """A subscriber that follows the end of a topic, so that all messages are trimmed.

    It puts a message to learn the newest id, and gets with that as its LAST.
    """

    def __init__(self, bus: Bus, client: bytes, topic: str) -> None:
        self._endpoint, self._client, self._topic = endpoint(bus), client, topic
        self._ending = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self.failure: str = ""

    def __enter__(self) -> "Collecting":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        self._thread.join()
        if self.failure:
            raise LoadFailed(self.failure)

    def _run(self) -> None:
        with closing(Bare(self._endpoint, self._client)) as bare:
            bare.hello()
            while not self._ending.wait(COLLECT_S):
                word, _, newest = bare.put(self._topic, BODY)
                if word != "OK" or not isinstance(newest, int):
                    self.failure = f"the collecting client got {word}"
                    return
                bare.ask(wire.get(self._client, bare.epoch, self._topic, newest))
