"""Random streams to callers that read at random: no item is lost or reordered, no state is left."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.limits import KIB, Limits
from tests.rig.gsb_memory_peer import UNKNOWN_FIELD, MemoryPeer, Reply
from tests.rig.memory_bus import MemoryBus

MARK = 64 * KIB
LIMITS = GsbLimits(
    outbox_full_bytes=MARK, outbox_free_bytes=MARK // 4, free_partials=4, free_bytes=MARK
)
CALLERS = 2
caller = st.integers(0, CALLERS - 1)
service = st.integers(0, 1)  # one without credits, one with
steps = st.one_of(
    st.tuples(st.just("call"), caller, service),
    st.tuples(st.just("stream"), caller, service, st.sampled_from([1, 5000, 30_000, 70_000])),
    st.tuples(st.just("stream"), caller, service, st.just(30_000)),
    st.tuples(st.just("finish"), caller, service),
    st.tuples(st.just("cancel"), caller, service),
    st.tuples(st.just("starve"), caller),
    st.tuples(st.just("eat"), caller, st.sampled_from([1, 1000, 50_000, None])),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0])),
    st.tuples(st.just("hang_up"), caller),
)


class World:
    """Two services and two callers. A caller has at most one call to each service."""

    def __init__(self, *, padding: bytes) -> None:
        limits = Limits(outbox_max_bytes=64 * MARK)
        self.bus = MemoryBus(limits, gsb=LIMITS, gsb_padding=padding)
        self.services = [MemoryPeer(self.bus), MemoryPeer(self.bus, credits=True)]
        for number, peer in enumerate(self.services):
            peer.register(f"s{number}")
        self.callers = [MemoryPeer(self.bus, deadline_ms=5000) for _ in range(CALLERS)]
        self.gone: set[int] = set()
        self.ids: dict[tuple[int, int], str] = {}
        self.calls = 0
        self.items = 0
        self.sent: dict[str, list[int]] = {}  # by request id
        self.heard: list[dict[str, list[Any]]] = [{} for _ in range(CALLERS)]

    def call(self, caller: int, service: int) -> None:
        if caller in self.gone or (caller, service) in self.ids:
            return
        self.calls += 1
        request_id = f"{caller}-{service}-{self.calls}"
        self.callers[caller].call(f"s{service}", request_id)
        self.ids[caller, service] = f"{self.bus.gsb.calls.table.opened:x}"
        self.sent[self.ids[caller, service]] = []

    def stream(self, caller: int, service: int, size: int) -> None:
        if (caller, service) in self.ids:
            self.items += 1
            call_id = self.ids[caller, service]
            self.sent[call_id].append(self.items)
            item = b"%d," % self.items
            self.services[service].reply(call_id, item.ljust(size, b"."), partial=True)

    def finish(self, caller: int, service: int) -> None:
        if (caller, service) in self.ids:
            self.services[service].reply(self.ids.pop((caller, service)))

    def cancel(self, caller: int, service: int) -> None:
        if (caller, service) in self.ids and caller not in self.gone:
            number = next(iter(k for k in self.callers[caller].session.calls), b"")
            self.callers[caller].cancel(number.decode())

    def starve(self, caller: int) -> None:
        self.callers[caller].pipe.appetite = 0

    def eat(self, caller: int, size: int | None) -> None:
        if caller not in self.gone:
            self.callers[caller].pipe.eat(size)
            self.bus.turn()

    def wait(self, seconds: float) -> None:
        self.bus.pass_time(seconds)

    def hang_up(self, caller: int) -> None:
        if caller not in self.gone:
            self.gone.add(caller)
            self.callers[caller].pipe.hang_up()
            self.bus.turn()

    def end(self) -> None:
        """Let all callers read, all services answer, and the deadlines pass."""
        for number in range(CALLERS):
            self.eat(number, None)
        for pair in list(self.ids):
            self.finish(*pair)
        self.bus.pass_time(6)

    def replies(self) -> list[list[Reply]]:
        """Return the replies of each caller that is still connected."""
        return [
            peer.replies() for number, peer in enumerate(self.callers) if number not in self.gone
        ]


def run_program(program: list[tuple[Any, ...]], *, padding: bytes) -> World:
    world = World(padding=padding)
    for verb, *rest in program:
        getattr(world, verb)(*rest)
    world.end()
    return world


@given(st.lists(steps, max_size=60))
def test_streams_are_ordered_and_leave_no_state(program):
    worlds = [run_program(program, padding=padding) for padding in (b"", UNKNOWN_FIELD)]
    usual, unusual = (world.replies() for world in worlds)
    assert usual == unusual
    for received in usual:
        by_call: dict[str, list[tuple[int, bytes]]] = {}
        for request_id, _, kind, data in received:
            by_call.setdefault(request_id, []).append((kind, data))
        for replies in by_call.values():
            assert [kind for kind, _ in replies] == [1] * (len(replies) - 1) + [0]
            numbers = [int(data.split(b",")[0]) for kind, data in replies if kind]
            assert numbers == sorted(numbers)
    for world in worlds:
        stats = world.bus.stats("gsb")
        assert (stats["open_calls"], stats["serving"], stats["full"], stats["waiting"]) == (0,) * 4
        assert all(peer.is_read for peer in world.services)
