"""The bus and Freud's sessions against freud_bus and freud_talk, step by step.

Twice over: hypothesis looks for short programs that show a difference and makes
them shorter; a plain source of chance runs many more, long ones, always the same.

A cell of the bus's table of states is visited when a request of its row finds
the topic in its column; none may stay unvisited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from polybus.dialects.freud.server.topic_lifecycle import TABLE, TopicEvent, TopicState
from tests.property.bus.freud_world import (
    BODIES,
    CALLERS,
    FORGED,
    INTERNAL_EVENTS,
    NAMES,
    ODD,
    PUSHED_BODIES,
    Ask,
    World,
)
from tests.rig import freud_client
from tests.rig.oracle.freud_bus import Caller

EXAMPLES, STEPS = 40, 40
PROGRAMS, LENGTH = 80, 150

VISITED: Counter[tuple[int, int]] = Counter()

# Mostly one name, so that the clients' requests interact.
A_NAME = (NAMES[0], *NAMES, NAMES[0])
A_WAIT = (0, 0, 0, 1, 5, -1, -7, 40)
A_WHILE = (0.25, 1, 1, 5, 29.75, 30)
A_STATE = (*TopicState, TopicState.LIVE, TopicState.RECREATING, TopicState.AWAITING)
A_ROOM = (0, 0, 5, 20, 50)
AN_AMOUNT = (1, 8, 30, None, None)
PLACES = 12  # how far numbers go that stand for clients and subscriptions


def asking(make: Callable[..., bytes], *fields: Any) -> Ask:
    return lambda world: make(*fields)


def of_key(make: Callable[..., bytes], place: int, *fields: Any) -> Ask:
    return lambda world: make(world.key(place), *fields)


# --- short programs ----------------------------------------------------------

names = st.sampled_from(A_NAME)
places = st.integers(0, PLACES)
waits = st.sampled_from(A_WAIT)
of_topics: st.SearchStrategy[Ask] = st.builds(
    asking,
    st.sampled_from(
        (freud_client.create, freud_client.delete, freud_client.subscribe, freud_client.count)
    ),
    names,
)
producing: st.SearchStrategy[Ask] = st.builds(
    asking, st.just(freud_client.produce), names, st.sampled_from(BODIES)
)
reading: st.SearchStrategy[Ask] = st.one_of(
    st.builds(of_key, st.sampled_from((freud_client.get, freud_client.get_record)), places, waits),
    st.builds(of_key, st.just(freud_client.unsubscribe), places),
)
odd: st.SearchStrategy[Ask] = st.builds(asking, st.just(bytes), st.sampled_from(ODD))
anything = st.one_of(of_topics, producing, reading, odd)
messages = st.tuples(names, st.sampled_from(PUSHED_BODIES))


class FreudMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(VISITED)

    @initialize(state=st.sampled_from(A_STATE), name=names)
    def begin(self, state: TopicState, name: bytes) -> None:
        self.world.begin(state, name)

    @rule(caller=st.sampled_from(CALLERS))
    def new_client(self, caller: Caller) -> None:
        self.world.new_client(caller)

    @rule(place=places, asks=st.lists(of_topics, min_size=1, max_size=2))
    def ask_for_topics(self, place: int, asks: list[Ask]) -> None:
        self.world.send(place, asks)

    @rule(place=places, asks=st.lists(producing, min_size=1, max_size=5))
    def produce(self, place: int, asks: list[Ask]) -> None:
        self.world.send(place, asks)

    @rule(place=places, asks=st.lists(reading, min_size=1, max_size=3))
    def read(self, place: int, asks: list[Ask]) -> None:
        self.world.send(place, asks)

    @rule(
        place=places,
        asks=st.lists(anything, min_size=1, max_size=6),
        cuts=st.lists(st.integers(0, 200), max_size=2),
    )
    def ask_for_anything(self, place: int, asks: list[Ask], cuts: list[int]) -> None:
        self.world.send(place, asks, cuts)

    @rule(place=places)
    def send_too_much(self, place: int) -> None:
        self.world.send_too_much(place)

    @rule(place=places)
    def half_close(self, place: int) -> None:
        self.world.half_close(place)

    @rule(place=places, says_so=st.booleans())
    def vanish(self, place: int, says_so: bool) -> None:
        self.world.vanish(place, says_so)

    @rule(place=places, room=st.sampled_from(A_ROOM))
    def stop_reading(self, place: int, room: int) -> None:
        self.world.stop_reading(place, room)

    @rule(place=places, amount=st.sampled_from(AN_AMOUNT))
    def read_on(self, place: int, amount: int | None) -> None:
        self.world.read_on(place, amount)

    @rule(seconds=st.sampled_from(A_WHILE))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.integers(-40, 40))
    def set_wall_clock(self, seconds: int) -> None:
        self.world.set_wall_clock(seconds)

    @rule()
    def new_pusher(self) -> None:
        self.world.new_pusher()

    @rule(place=places, name=names)
    def push_subscribe(self, place: int, name: bytes) -> None:
        self.world.push_subscribe(place, name)

    @rule(place=places, name=names)
    def push_unsubscribe(self, place: int, name: bytes) -> None:
        self.world.push_unsubscribe(place, name)

    @rule(place=places, wanted=st.lists(messages, min_size=1, max_size=4))
    def publish(self, place: int, wanted: list[tuple[bytes, bytes]]) -> None:
        self.world.publish(place, wanted)

    @rule(place=places)
    def push_end(self, place: int) -> None:
        self.world.push_end(place)

    @invariant()
    def everything_is_the_same(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.leave()


@pytest.mark.timeout(120)
def test_no_short_program_shows_a_difference():
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(FreudMachine, settings=settings)


# --- long programs -----------------------------------------------------------

Action = tuple[str, tuple[Any, ...]]


def an_ask(chance: Random) -> Ask:
    name, place = chance.choice(A_NAME), chance.randint(0, FORGED)
    get = chance.choice((freud_client.get, freud_client.get_record))
    ways: dict[str, tuple[int, Ask]] = {
        "topic": (4, asking(chance.choice((freud_client.create, freud_client.delete)), name)),
        "subscribe": (4, asking(freud_client.subscribe, name)),
        "count": (1, asking(freud_client.count, name)),
        "produce": (8, asking(freud_client.produce, name, chance.choice(BODIES))),
        "get": (10, of_key(get, place, chance.choice(A_WAIT))),
        "unsubscribe": (1, of_key(freud_client.unsubscribe, place)),
        "odd": (1, asking(bytes, chance.choice(ODD))),
    }
    (way,) = chance.choices(list(ways), [weight for weight, _ in ways.values()])
    return ways[way][1]


def an_action(chance: Random) -> Action:
    place, name = chance.randint(0, PLACES), chance.choice(A_NAME)
    asks = [an_ask(chance) for _ in range(chance.choice((1, 1, 2, 3, 5)))]
    cuts = chance.sample(range(200), chance.choice((0, 0, 1, 2)))
    pushed = [(chance.choice(A_NAME), chance.choice(PUSHED_BODIES)) for _ in range(2)]
    actions: dict[str, tuple[int, tuple[Any, ...]]] = {
        "send": (50, (place, asks, cuts)),
        "new_client": (4, (chance.choice(CALLERS),)),
        "send_too_much": (1, (place,)),
        "half_close": (2, (place,)),
        "vanish": (3, (place, chance.random() < 0.5)),
        "stop_reading": (4, (place, chance.choice(A_ROOM))),
        "read_on": (6, (place, chance.choice(AN_AMOUNT))),
        "pass_time": (4, (chance.choice(A_WHILE),)),
        "set_wall_clock": (1, (chance.randint(-40, 40),)),
        "new_pusher": (3, ()),
        "push_subscribe": (4, (place, name)),
        "push_unsubscribe": (2, (place, name)),
        "publish": (6, (place, pushed[: chance.randint(1, 2)])),
        "push_end": (1, (place,)),
    }
    (what,) = chance.choices(list(actions), [weight for weight, _ in actions.values()])
    return what, actions[what][1]


def a_program(seed: int) -> list[Action]:
    chance = Random(seed)
    begin = ("begin", (chance.choice(A_STATE), chance.choice(A_NAME)))
    return [begin, *(an_action(chance) for _ in range(LENGTH))]


def run(program: list[Action]) -> None:
    world = World(VISITED)
    for what, fields in program:
        getattr(world, what)(*fields)
        world.check()
    world.leave()


@pytest.mark.timeout(120)
def test_no_long_program_shows_a_difference_and_every_cell_is_visited(record_property):
    VISITED.clear()
    for seed in range(PROGRAMS):
        try:
            run(a_program(seed))
        except BaseException as error:
            error.add_note(f"program {seed}")
            raise
    visits = {
        f"{TopicEvent(event).name} in {TopicState(state).name}": VISITED[event, state]
        for (event, state), transition in TABLE.items()
        # An internal event may be impossible in a state that it would not change.
        if event not in INTERNAL_EVENTS or transition.state != state
    }
    record_property("visits", visits)
    assert [cell for cell, times in visits.items() if not times] == []
