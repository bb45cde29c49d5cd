"""What takes part: our bus, the store alone, a bare ROUTER."""

from bench.harness.peer import Running
from bench.harness.results import OURS, Values
from bench.native.contenders import Bus
from bench.peers import router
from bench.pirate.cases import CLIENTS, HELD, STORE
from bench.pirate.clients import Clients, echo, get, get_again, put
from bench.pirate.places import Collecting, greet, subscribe
from bench.store.writing import Ours as StoreAlone
from polybus.store.contract import Store


def names(topic: str, count: int = CLIENTS) -> list[bytes]:
    return [f"{topic}-{number:02}".encode() for number in range(count)]


def putting(bus: Bus, topic: str, name: str = OURS) -> Clients:
    """A subscriber keeps the topic; the putting clients do not read it."""
    clients = names(topic)
    greet(bus, clients)
    subscribe(bus, [f"{topic}-keeper".encode()], topic)
    return Clients(name, bus.pid, bus.ports["pirate"], clients, put(topic))


class Filled:
    """A topic with as many messages as the readers will read."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._clients = putting(bus, topic)
        self._messages = 0

    def up_to(self, newest: int) -> None:
        missing = newest - self._messages
        if missing > 0:
            self._messages += self._clients.do(-(-missing // CLIENTS))


def getting(bus: Bus, topic: str, count: int, filled: Filled) -> Clients:
    clients = names(f"{topic}-reader", count)
    subscribe(bus, clients, topic)
    return Clients(
        OURS, bus.pid, bus.ports["pirate"], clients, get(topic), first=0, ready=filled.up_to
    )


def getting_again(bus: Bus, topic: str, filled: Filled) -> Clients:
    clients = names(f"{topic}-reader", 1)
    subscribe(bus, clients, topic)
    filled.up_to(1)
    return Clients(OURS, bus.pid, bus.ports["pirate"], clients, get_again(topic))


def echoing(running: Running, count: int) -> Clients:
    assert running.pid is not None
    return Clients(router.NAME, running.pid, running.publish_port, names("echo", count), echo())


def store_alone(store: Store, topic: str) -> StoreAlone:
    alone = StoreAlone(store, store.create(topic, 1, {}), CLIENTS, 1)
    alone.name = STORE
    return alone


class Followed:
    """PUTs, while the topic's keeper follows its end; one more who stays behind holds all of it."""

    def __init__(self, bus: Bus, topic: str, *, held: bool) -> None:
        self._bus, self._topic = bus, topic
        self.name, self.pid = (HELD if held else OURS), bus.pid
        self._keeper = f"{topic}-keeper".encode()
        self._clients = putting(bus, topic, self.name)
        if held:
            subscribe(bus, [b"behind"], topic)

    def calibrate(self, wanted_s: float) -> None:
        with Collecting(self._bus, self._keeper, self._topic):
            self._clients.calibrate(wanted_s)

    def measure(self) -> Values:
        with Collecting(self._bus, self._keeper, self._topic):
            return self._clients.measure()
