"""The bus and Freud's sessions against freud_bus and freud_talk, step by step.

Several clients of several users, all requests, pipelined and cut anywhere,
clients that wait, stop reading, hang up and vanish, rqueue on the same names,
quotas and rules, and time. After each step every byte that anybody has received
is compared, and what everybody holds of each quota, and every drop by its reason.

A cell of the bus's table of states is visited when a request of its row finds
the topic in its column; none may stay unvisited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from polybus.bus.lifecycle import TABLE, State, Verb
from polybus.bus.policy import Policy
from polybus.bus.ruletable import Placed
from polybus.dialects.freud.codec import MALFORMED_TEXTS
from polybus.model.identity import Identity
from polybus.model.limits import FreudLimits, Limits, QuotaLimits
from polybus.model.rules import Rule
from polybus.testing import rqueue
from polybus.testing.drip import cut
from polybus.testing.freud import (
    FORGED_SUBSCRIBER,
    NOTICE,
    answers_in,
    count,
    create,
    delete,
    frame,
    get,
    get_record,
    list_topics,
    produce,
    subscribe,
    unsubscribe,
)
from polybus.testing.memory import MemoryBus
from polybus.testing.oracle.freud import Malformed, One, Produce, Request, scan
from polybus.testing.oracle.freud_bus import (
    BYTES,
    SUBSCRIPTIONS,
    TOPICS,
    Caller,
    FreudBus,
    PushReader,
    Reply,
)
from polybus.testing.oracle.freud_talk import Connection, Talk
from polybus.testing.pipe import MemoryPipe

EXAMPLES, STEPS = 120, 40
MAX_FRAME_BYTES = 300
TIMEOUT_S = 30.0
MAX_UNREAD = 6
CALLERS = (Caller(1, "a"), Caller(1, "b"), Caller(2, "a"), Caller(3, ""))
PUSHER = Identity(9)
DENIED = {(3, "create", b"a"), (3, "produce", b"b"), (2, "subscribe", b"b")}
QUOTAS = {BYTES: 60, SUBSCRIPTIONS: 5, TOPICS: 3}
OWN_QUOTAS = {2: {BYTES: 25, SUBSCRIPTIONS: 2}, 3: {TOPICS: 1}}
NAMES = (b"a", b"b", "\u00fc/x".encode())
BODIES = (b"", b"0123456789", b"x" * 20, b"y" * 40)
PUSHED_BODIES = (*BODIES, NOTICE + b"a", NOTICE)
BAD = (
    frame(99),
    frame(6, b"x"),
    frame(0, b"\x05\0\0\0a"),
    create(b"_a"),
    create(b"a,b"),
    produce(b"a", NOTICE + b"a"),
    frame(3, bytes(15)),
)
TOO_LARGE = frame(4, bytes(MAX_FRAME_BYTES + 1))

Cell = tuple[Verb, State]
VISITED: Counter[Cell] = Counter()

# --- what clients may ask for ------------------------------------------------

Known = list[bytes]  # subscriber ids, as far as clients have heard of them
Ask = Callable[[Known], bytes]


# Mostly one name, so that what clients do has to do with each other.
names = st.sampled_from((NAMES[0], *NAMES, NAMES[0]))


def of_name(make: Callable[[bytes], bytes]) -> st.SearchStrategy[Ask]:
    return names.map(lambda name: lambda _known: make(name))


def of_id(make: Callable[[bytes], bytes]) -> st.SearchStrategy[Ask]:
    return st.integers(0, 12).map(lambda place: lambda known: make(chosen(known, place)))


def chosen(known: Known, place: int) -> bytes:
    """Mostly one of the latest ids."""
    return known[-1 - place % len(known)] if known and place < 12 else FORGED_SUBSCRIBER


def getting(make: Callable[[bytes, int], bytes]) -> st.SearchStrategy[Ask]:
    seconds = st.sampled_from((0, 0, 1, 5, -1, -7, 40))
    return seconds.flatmap(lambda s: of_id(lambda key: make(key, s)))


of_topics = st.one_of(of_name(create), of_name(delete), of_name(subscribe), of_name(count))
producing: st.SearchStrategy[Ask] = st.tuples(names, st.sampled_from(BODIES)).map(
    lambda both: lambda _known: produce(*both)
)
reading = st.one_of(getting(get), getting(get_record), of_id(unsubscribe))
odd: st.SearchStrategy[Ask] = st.sampled_from((list_topics(), *BAD)).map(
    lambda frame: lambda _known: frame
)
anything = st.one_of(of_topics, producing, reading, odd)
places = st.integers(0, 11)


class Pair:
    """One connection, in the bus and in the model."""

    def __init__(self, pipe: MemoryPipe, model: Connection) -> None:
        self.pipe = pipe
        self.model = model
        self.compared = 0

    @property
    def is_open(self) -> bool:
        return not self.model.gone

    @property
    def may_send(self) -> bool:
        return not (self.model.gone or self.model.no_more or self.model.closing)


def several(machine: FreudMachine) -> bool:
    """Somebody may leave, and something still goes on."""
    return sum(pair.may_send for pair in machine.pairs) > 2


class FreudMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        quotas = QuotaLimits(
            quota_bytes=QUOTAS[BYTES],
            quota_subscriptions=QUOTAS[SUBSCRIPTIONS],
            quota_topics=QUOTAS[TOPICS],
        )
        self.bus = MemoryBus(
            Limits(slow_consumer_timeout_s=1e9),
            freud=FreudLimits(MAX_FRAME_BYTES, TIMEOUT_S, MAX_UNREAD),
            quotas=quotas,
            policy=policy(),
        )
        self.bus.broker.quotas.configure(quotas, OWN_QUOTAS)
        model = FreudBus(allows, limit, TIMEOUT_S, MAX_UNREAD, self.model_now, self.bus.wall_ns)
        self.talk = Talk(model, MAX_FRAME_BYTES, MALFORMED_TEXTS)
        self.talk.now_s = self.bus.now_s
        self.model = model
        self.pairs: list[Pair] = []
        self.pushers: list[tuple[MemoryPipe, PushReader]] = []
        self.known: Known = []

    def model_now(self) -> float:
        return self.talk.now_s

    # --- what happens

    @initialize(state=st.sampled_from((*State, State.LIVE, State.RECREATING)), name=names)
    def begin(self, state: State, name: bytes) -> None:
        """Three clients, and a topic in a state that chance alone would seldom reach."""
        for caller in CALLERS[:3]:
            self.new_client(caller)
        if state is State.GONE:
            return
        self.say(0, create(name), subscribe(name))
        if state is State.LIVE:
            return
        self.say(0, delete(name))
        if state is State.DELETING:
            return
        self.say(0, create(name), produce(name, b"0123456789"))
        if state is State.AWAITING:
            self.say(0, get_record(self.known[0]))

    @precondition(lambda self: sum(pair.is_open for pair in self.pairs) < 6)
    @rule(caller=st.sampled_from(CALLERS))
    def new_client(self, caller: Caller) -> None:
        identity = Identity(caller.uid, groups=frozenset(), service=caller.service)
        pipe = self.bus.connect_freud(identity=identity)
        self.pairs.append(Pair(pipe, self.talk.connect(caller)))

    @rule(place=places, wanted=st.lists(of_topics, min_size=1, max_size=2))
    def ask_for_topics(self, place: int, wanted: list[Ask]) -> None:
        self.send(place, wanted)

    @rule(place=places, wanted=st.lists(producing, min_size=1, max_size=5))
    def ask_to_produce(self, place: int, wanted: list[Ask]) -> None:
        self.send(place, wanted)

    @rule(place=places, wanted=st.lists(reading, min_size=1, max_size=3))
    def ask_to_read(self, place: int, wanted: list[Ask]) -> None:
        self.send(place, wanted)

    @rule(
        place=places,
        wanted=st.lists(anything, min_size=1, max_size=6),
        cuts=st.lists(st.integers(0, 200), max_size=2),
    )
    def ask_for_anything(self, place: int, wanted: list[Ask], cuts: list[int]) -> None:
        self.send(place, wanted, cuts)

    @rule(place=places, key=places, seconds=st.sampled_from((-1, 3, 35)), times=st.integers(1, 3))
    def wait(self, place: int, key: int, seconds: int, times: int) -> None:
        pair = self.one(place, lambda pair: pair.may_send)
        if pair is not None:
            self.deliver(pair, times * get_record(chosen(self.known, key), seconds))

    @precondition(several)
    @rule(place=places)
    def send_too_much(self, place: int) -> None:
        pair = self.one(place, lambda pair: pair.may_send and place > 8)
        if pair is not None:
            self.deliver(pair, TOO_LARGE + list_topics())

    @precondition(several)
    @rule(place=places)
    def half_close(self, place: int) -> None:
        pair = self.one(place, lambda pair: pair.may_send)
        if pair is not None:
            pair.pipe.shut_down()
            self.bus.turn()
            self.talk.half_close(pair.model)

    @precondition(several)
    @rule(place=places, says_so=st.booleans())
    def vanish(self, place: int, says_so: bool) -> None:
        """Its end is read, and then a write fails; or nothing but the end is reported."""
        pair = self.one(place, lambda pair: pair.is_open)
        if pair is None:
            return
        if says_so and pair.may_send:
            pair.pipe.broken = pair.model.broken = True
            pair.pipe.shut_down()
            self.bus.turn()
            self.talk.half_close(pair.model)
        self.end(pair)

    @rule(place=places, room=st.sampled_from((0, 0, 5, 20, 50)))
    def stop_reading(self, place: int, room: int) -> None:
        pair = self.one(place, lambda pair: pair.is_open and pair.model.room is None)
        if pair is not None:
            pair.pipe.appetite = pair.model.room = room

    @rule(place=places, amount=st.sampled_from((1, 8, 30, None, None)))
    def read_on(self, place: int, amount: int | None) -> None:
        pair = self.one(place, lambda pair: pair.is_open and pair.model.room is not None)
        if pair is not None:
            pair.pipe.eat(amount)
            self.bus.turn()
            self.talk.eat(pair.model, amount)

    @rule(seconds=st.sampled_from((0.25, 1, 1, 5, 29.75, 30)))
    def pass_time(self, seconds: float) -> None:
        self.bus.pass_time(seconds)
        self.talk.pass_time(seconds)

    @rule(seconds=st.integers(-40, 40))
    def set_wall_clock(self, seconds: int) -> None:
        self.bus.wall_ahead_ns += seconds * 10**9

    # --- rqueue on the same names

    @precondition(lambda self: len(self.pushers) < 2)
    @rule()
    def new_pusher(self) -> None:
        reader = PushReader()
        self.pushers.append((self.bus.connect(identity=PUSHER), reader))
        self.model.push_readers.append(reader)

    @precondition(lambda self: self.pushers)
    @rule(place=places, name=names)
    def push_subscribe(self, place: int, name: bytes) -> None:
        pipe, reader = self.pushers[place % len(self.pushers)]
        pipe.deliver(rqueue.subscribe(name))
        self.bus.turn()
        if name not in reader.topics:
            self.model.push_subscribe(reader, name)
            self.talk.settle()

    @precondition(lambda self: self.pushers)
    @rule(place=places, name=names)
    def push_unsubscribe(self, place: int, name: bytes) -> None:
        pipe, reader = self.pushers[place % len(self.pushers)]
        pipe.deliver(rqueue.remove(name))
        self.bus.turn()
        reader.topics.discard(name)

    @precondition(lambda self: self.pushers)
    @rule(
        place=places,
        wanted=st.lists(
            st.tuples(names, st.sampled_from(PUSHED_BODIES)),
            min_size=1,
            max_size=4,
        ),
    )
    def publish(self, place: int, wanted: list[tuple[bytes, bytes]]) -> None:
        pipe, _ = self.pushers[place % len(self.pushers)]
        pipe.deliver(b"".join(rqueue.publish(*one) for one in wanted))
        self.bus.turn()
        together: dict[bytes, list[bytes]] = {}
        for name, body in wanted:
            together.setdefault(name, []).append(body)
        for name, bodies in together.items():
            self.visit(Verb.COLLECT, name)
            self.model.publish(name, bodies)
        self.talk.settle()

    @precondition(lambda self: self.pushers)
    @rule(place=places)
    def push_end(self, place: int) -> None:
        pipe, reader = self.pushers.pop(place % len(self.pushers))
        pipe.hang_up()
        self.bus.turn()
        self.compare_push(pipe, reader)
        self.model.push_readers.remove(reader)

    # --- what must hold

    @invariant()
    def everything_is_the_same(self) -> None:
        self.compare_answers()
        self.compare_holdings()
        self.compare_drops()
        self.compare_states()

    def compare_answers(self) -> None:
        for pair in self.pairs:
            if pair.model.closing and not pair.model.gone:
                assert pair.pipe.closed
                if not pair.model.written:
                    self.end(pair)
            self.compare(pair)
        for pipe, reader in self.pushers:
            self.compare_push(pipe, reader)

    def compare_holdings(self) -> None:
        for uid in {caller.uid for caller in CALLERS}:
            for quota in QUOTAS:
                used = self.bus.broker.quotas.used(uid, quota)
                assert used == self.model.used(uid, quota), (uid, quota)
        assert self.bus.stats("subscriptions") == len(self.model.subscriptions()) + sum(
            len(reader.topics) for _, reader in self.pushers
        )

    def compare_drops(self) -> None:
        model = {reason: n for reason, n in self.model.dropped.items() if n}
        assert self.bus.stats("dropped") == model

    def compare_states(self) -> None:
        topics = self.bus.broker.topics._topics
        for name in NAMES:
            state = topics[name].state if name in topics else State.GONE
            assert state.value == self.model.state(name), name

    def teardown(self) -> None:
        """Everybody leaves; after a while nothing is left, and nothing is charged."""
        for pair in self.pairs:
            if pair.is_open:
                self.end(pair)
        for pipe, _ in self.pushers:
            pipe.hang_up()
        self.bus.turn()
        for _ in range(3):
            self.bus.pass_time(TIMEOUT_S)
        broker = self.bus.broker
        left = [one for one in broker.quotas.accounts() if one["quota"] != TOPICS]
        assert left == []
        assert self.bus.stats("subscriptions") == 0
        assert self.bus.stats("connections", "open") == 0

    # --- inside

    def one(self, place: int, suits: Callable[[Pair], bool]) -> Pair | None:
        found = [pair for pair in self.pairs if suits(pair)]
        return found[place % len(found)] if found else None

    def send(self, place: int, wanted: list[Ask], cuts: Sequence[int] = ()) -> None:
        pair = self.one(place, lambda pair: pair.may_send)
        if pair is not None:
            for piece in cut(b"".join(ask(self.known) for ask in wanted), cuts):
                self.deliver(pair, piece)

    def say(self, place: int, *requests: bytes) -> None:
        self.deliver(self.pairs[place], b"".join(requests))
        self.compare(self.pairs[place])

    def deliver(self, pair: Pair, data: bytes) -> None:
        for asked in scan(pair.model.held + data, MAX_FRAME_BYTES)[1]:
            self.foresee(asked)
        pair.pipe.deliver(data)
        self.bus.turn()
        self.talk.deliver(pair.model, data)

    def foresee(self, asked: One) -> None:
        """Books the cell of a request that is about to be carried out, if nothing is before it."""
        verbs = {0: Verb.CREATE, 1: Verb.DELETE, 2: Verb.SUBSCRIBE, 7: Verb.COUNT}
        if isinstance(asked, Produce):
            self.visit(Verb.PRODUCE, asked.topic)
        elif isinstance(asked, Request) and asked.type in verbs:
            self.visit(verbs[asked.type], asked.subject)
        else:
            assert not isinstance(asked, Malformed) or asked.reason in MALFORMED_TEXTS

    def visit(self, verb: Verb, name: bytes) -> None:
        VISITED[verb, State(self.model.state(name))] += 1

    def end(self, pair: Pair) -> None:
        pair.pipe.hang_up()
        self.bus.turn()
        self.talk.end(pair.model)

    def compare(self, pair: Pair) -> None:
        found, size = answers_in(pair.pipe.taken)
        expected = pair.model.heard
        for answer, reply in zip(found[pair.compared :], expected[pair.compared :], strict=True):
            payload = reply.payload
            if reply.found is not None:
                payload = self.learn(answer.payload, reply)
            assert answer == (reply.code, payload)
        pair.compared = len(found)
        assert len(pair.pipe.taken) - size == pair.model.started + pair.model.torn

    def learn(self, key: bytes, reply: Reply) -> bytes:
        assert reply.found is not None
        assert len(key) == 16
        assert key not in self.talk.ids
        self.talk.ids[key] = reply.found
        self.known.append(key)
        return key

    def compare_push(self, pipe: MemoryPipe, reader: PushReader) -> None:
        expected = b"".join(rqueue.notification(*one) for one in reader.got)
        assert bytes(pipe.taken) == expected


def policy() -> Policy:
    rules = [Rule.parse(f"deny user:{uid} {verb} {name.decode()}") for uid, verb, name in DENIED]
    made = Policy()
    made.replace([Placed(one, "test", one.who.number) for one in rules])
    return made


def allows(caller: Caller, verb: str, name: bytes, creator: Caller | None) -> bool:
    if (caller.uid, verb, name) in DENIED:
        return False
    return verb != "delete" or caller == creator


def limit(uid: int, quota: str) -> int:
    return OWN_QUOTAS.get(uid, {}).get(quota, QUOTAS[quota])


@pytest.mark.timeout(120)
def test_the_bus_does_what_its_model_does_in_every_cell_of_its_table():
    VISITED.clear()
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(FreudMachine, settings=settings)
    unvisited = [f"{verb.value} while {state.value}" for verb, state in set(TABLE) - set(VISITED)]
    assert unvisited == []
