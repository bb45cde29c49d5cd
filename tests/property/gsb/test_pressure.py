"""Random streams to callers that read as they like: nothing is lost, reordered or left over."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb.limits import GsbLimits
from polybus.model.limits import KIB, Limits
from tests.rig.gsb_memory_peer import Far
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
    """Each caller has at most one call with each service; items are numbered."""

    def __init__(self, *, fast_path_enabled: bool) -> None:
        self.bus = MemoryBus(Limits(outbox_max_bytes=64 * MARK), gsb=LIMITS)
        self.bus.gsb.calls.table.fast_path_enabled = fast_path_enabled
        self.services = [Far(self.bus), Far(self.bus, credits=True)]
        for number, far in enumerate(self.services):
            far.register(f"s{number}")
        self.callers = [Far(self.bus, deadline_ms=5000) for _ in range(CALLERS)]
        self.gone: set[int] = set()
        self.ids: dict[tuple[int, int], str] = {}
        self.calls = 0
        self.items = 0
        self.sent: dict[str, list[int]] = {}  # by request id
        self.heard: list[dict[str, list[Any]]] = [{} for _ in range(CALLERS)]

    def call(self, who: int, whom: int) -> None:
        if who in self.gone or (who, whom) in self.ids:
            return
        self.calls += 1
        request_id = f"{who}-{whom}-{self.calls}"
        self.callers[who].call(f"s{whom}", request_id)
        self.ids[who, whom] = f"{self.bus.gsb.calls.table.opened:x}"
        self.sent[self.ids[who, whom]] = []

    def stream(self, who: int, whom: int, size: int) -> None:
        if (who, whom) in self.ids:
            self.items += 1
            call_id = self.ids[who, whom]
            self.sent[call_id].append(self.items)
            item = b"%d," % self.items
            self.services[whom].reply(call_id, item.ljust(size, b"."), partial=True)

    def finish(self, who: int, whom: int) -> None:
        if (who, whom) in self.ids:
            self.services[whom].reply(self.ids.pop((who, whom)))

    def cancel(self, who: int, whom: int) -> None:
        if (who, whom) in self.ids and who not in self.gone:
            number = next(iter(k for k in self.callers[who].session.calls), b"")
            self.callers[who].cancel(number.decode())

    def starve(self, who: int) -> None:
        self.callers[who].pipe.appetite = 0

    def eat(self, who: int, size: int | None) -> None:
        if who not in self.gone:
            self.callers[who].pipe.eat(size)
            self.bus.turn()

    def wait(self, seconds: float) -> None:
        self.bus.pass_time(seconds)

    def hang_up(self, who: int) -> None:
        if who not in self.gone:
            self.gone.add(who)
            self.callers[who].pipe.hang_up()
            self.bus.turn()

    def end(self) -> None:
        """Everybody reads, all services answer, and time goes by."""
        for number in range(CALLERS):
            self.eat(number, None)
        for pair in list(self.ids):
            self.finish(*pair)
        self.bus.pass_time(6)

    def stories(self) -> list[list[tuple[str, int, int, bytes]]]:
        """What each caller that stayed has got."""
        return [
            [(one.request_id, one.code, one.type, one.data) for one in far.replies()]
            for number, far in enumerate(self.callers)
            if number not in self.gone
        ]


def lived(program: list[tuple[Any, ...]], *, fast_path_enabled: bool) -> World:
    world = World(fast_path_enabled=fast_path_enabled)
    for verb, *rest in program:
        getattr(world, verb)(*rest)
    world.end()
    return world


@given(st.lists(steps, max_size=60))
def test_streams(program):
    worlds = [lived(program, fast_path_enabled=enabled) for enabled in (True, False)]
    stories = [world.stories() for world in worlds]
    assert stories[0] == stories[1]
    for story in stories[0]:
        by_call: dict[str, list[tuple[int, bytes]]] = {}
        for request_id, _, kind, data in story:
            by_call.setdefault(request_id, []).append((kind, data))
        for replies in by_call.values():
            assert [kind for kind, _ in replies] == [1] * (len(replies) - 1) + [0]
            numbers = [int(data.split(b",")[0]) for kind, data in replies if kind]
            assert numbers == sorted(numbers)
    for world in worlds:
        stats = world.bus.stats("gsb")
        assert (stats["open_calls"], stats["serving"], stats["full"], stats["waiting"]) == (0,) * 4
        assert all(far.is_read for far in world.services)
