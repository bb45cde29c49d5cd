"""A bus in memory and its model side by side: each action is done to both, then compared.

Several clients of several users, all requests, pipelined and cut anywhere,
clients that wait, stop reading, hang up and vanish, rqueue on the same names,
quotas and rules, and time. `check` compares every byte that a client has received,
the use of each quota by each user, every drop by its reason, and each topic's state.

An action is a method and plain arguments, and is valid in every state: the number of a client
or a subscription is taken modulo their count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.freud.codec import MALFORMED_TEXTS
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server.topic_lifecycle import EphemeralTopic, TopicEvent, TopicState
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from polybus.model.limits import Limits, QuotaLimits
from tests.rig import freud_client, rqueue_client
from tests.rig.byte_feeder import cut
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.oracle.freud import One, Produce, Request, scan
from tests.rig.oracle.freud_bus import (
    BYTES,
    SUBSCRIPTIONS,
    TOPICS,
    Caller,
    FreudBus,
    PushReader,
    Reply,
)
from tests.rig.oracle.freud_dialogue import Connection, Talk

MAX_FRAME_BYTES = 300
TIMEOUT_S = 30.0
DETACHED_S = 45.0
MAX_UNREAD = 6
CALLERS = (Caller(1, "a"), Caller(1, "b"), Caller(2, "a"), Caller(3, ""))
PUSHER = Identity(9)
# User 3 may do nothing with b, and so does not even see it.
DENIED = {
    (3, "create", b"a"),
    (3, "produce", b"b"),
    (3, "subscribe", b"b"),
    (2, "subscribe", b"b"),
}
QUOTAS = {BYTES: 60, SUBSCRIPTIONS: 5, TOPICS: 3}
OWN_QUOTAS = {2: {BYTES: 25, SUBSCRIPTIONS: 2}, 3: {TOPICS: 1}}
NAMES = (b"a", b"b", "\u00fc/x".encode())
BODIES = (b"", b"0123456789", b"x" * 20, b"y" * 40, freud_client.NOTICE + b"a", b"\0FREUD\0")
PUSHED_BODIES = (*BODIES, freud_client.NOTICE)
ODD = (
    freud_client.list_topics(),
    freud_client.frame(99),
    freud_client.frame(6, b"x"),
    freud_client.frame(0, b"\x05\0\0\0a"),
    freud_client.create(b"_a"),
    freud_client.create(b"a,b"),
    freud_client.frame(3, bytes(15)),
)
TOO_LARGE = freud_client.frame(4, bytes(MAX_FRAME_BYTES + 1))
FORGED = 12  # the index of an id that no subscription has

VERBS = {0: TopicEvent.CREATE, 1: TopicEvent.DELETE, 2: TopicEvent.SUBSCRIBE, 7: TopicEvent.COUNT}
INTERNAL_EVENTS = (TopicEvent.MARKED_READ, TopicEvent.RELEASE, TopicEvent.EXPIRE)
Ask = Callable[["World"], bytes]


class Pair:
    """One connection, in the bus and in the model."""

    def __init__(self, pipe: MemoryPipe, model: Connection) -> None:
        self.pipe = pipe
        self.model = model
        self.compared = 0  # answers, and their bytes
        self.compared_bytes = 0
        self.is_over = False

    @property
    def is_open(self) -> bool:
        return not self.model.gone

    @property
    def may_send(self) -> bool:
        return not (self.model.gone or self.model.no_more or self.model.closing)


class World:
    """`visited` counts the cells of the bus's table that were met."""

    def __init__(self, visited: Counter[tuple[int, int]]) -> None:
        quotas = QuotaLimits(QUOTAS[BYTES], QUOTAS[SUBSCRIPTIONS], QUOTAS[TOPICS])
        self.bus = MemoryBus(
            Limits(slow_consumer_timeout_s=1e9),
            freud=FreudLimits(MAX_FRAME_BYTES, TIMEOUT_S, MAX_UNREAD, DETACHED_S),
            quotas=quotas,
            policy=policy(),
        )
        self.bus.broker.quotas.configure(quotas, OWN_QUOTAS)
        self.model = FreudBus(
            allows, limit, TIMEOUT_S, DETACHED_S, MAX_UNREAD, lambda: self.talk.now_s, self.wall_ns
        )
        self.talk = Talk(self.model, MAX_FRAME_BYTES, MALFORMED_TEXTS)
        self.talk.now_s = self.bus.now_s
        self.visited = visited
        self.record_internal_events()
        self.pairs: list[Pair] = []
        self.pushers: list[tuple[MemoryPipe, PushReader]] = []
        self.known: list[bytes] = []  # subscriber ids that clients have received

    def record_internal_events(self) -> None:
        lifecycle = self.bus.topics._lifecycle
        apply = lifecycle.apply

        def record(event: TopicEvent, topic: EphemeralTopic, *arguments: object) -> None:
            if event in INTERNAL_EVENTS:
                self.visited[event, TopicState(topic.state)] += 1
            apply(event, topic, *arguments)

        lifecycle.apply = record  # type: ignore[method-assign]

    # --- clients

    def begin(self, state: TopicState, name: bytes) -> None:
        """Three clients, and a topic in a state that chance alone would seldom reach."""
        for caller in CALLERS[:3]:
            self.new_client(caller)
        if state is TopicState.GONE:
            return
        self.say(freud_client.create(name), freud_client.subscribe(name))
        if state is TopicState.LIVE:
            return
        self.say(freud_client.delete(name))
        if state is TopicState.DELETING:
            return
        self.say(freud_client.create(name), freud_client.produce(name, b"0123456789"))
        if state is TopicState.AWAITING:
            self.say(freud_client.get_record(self.known[0]))

    def new_client(self, caller: Caller) -> None:
        if sum(pair.is_open for pair in self.pairs) < 6:
            identity = Identity(caller.uid, groups=frozenset(), service=caller.service)
            pipe = self.bus.connect_freud(identity=identity)
            self.pairs.append(Pair(pipe, self.talk.connect(caller)))

    def send(self, place: int, asks: Sequence[Ask], cuts: Sequence[int] = ()) -> None:
        pair = self.one(place, lambda pair: pair.may_send)
        if pair is not None:
            for piece in cut(b"".join(ask(self) for ask in asks), cuts):
                self.deliver(pair, piece)

    def send_too_much(self, place: int) -> None:
        pair = self.one(place, lambda pair: pair.may_send)
        if pair is not None and self.several():
            self.deliver(pair, TOO_LARGE + freud_client.list_topics())

    def half_close(self, place: int) -> None:
        pair = self.one(place, lambda pair: pair.may_send)
        if pair is not None and self.several():
            pair.pipe.shut_down()
            self.bus.turn()
            self.talk.half_close(pair.model)

    def vanish(self, place: int, says_so: bool) -> None:
        """End a connection. With `says_so` the bus reads its end before a write fails."""
        pair = self.one(place, lambda pair: pair.is_open)
        if pair is None or not self.several():
            return
        if says_so and pair.may_send:
            pair.pipe.broken = pair.model.broken = True
            pair.pipe.shut_down()
            self.bus.turn()
            self.talk.half_close(pair.model)
        self.end(pair)

    def stop_reading(self, place: int, room: int) -> None:
        pair = self.one(place, lambda pair: pair.is_open and pair.model.room is None)
        if pair is not None:
            pair.pipe.appetite = pair.model.room = room

    def read_on(self, place: int, amount: int | None) -> None:
        pair = self.one(place, lambda pair: pair.is_open and pair.model.room is not None)
        if pair is not None:
            pair.pipe.eat(amount)
            self.bus.turn()
            self.talk.eat(pair.model, amount)

    def pass_time(self, seconds: float) -> None:
        self.bus.pass_time(seconds)
        self.talk.pass_time(seconds)

    def set_wall_clock(self, seconds: int) -> None:
        self.bus.wall_ahead_ns += seconds * 10**9

    # --- rqueue on the same names

    def new_pusher(self) -> None:
        if len(self.pushers) < 2:
            reader = PushReader()
            self.pushers.append((self.bus.connect(identity=PUSHER), reader))
            self.model.push_readers.append(reader)

    def push_subscribe(self, place: int, name: bytes) -> None:
        if self.pushers:
            pipe, reader = self.pushers[place % len(self.pushers)]
            pipe.deliver(rqueue_client.subscribe(name))
            self.bus.turn()
            self.model.push_subscribe(reader, name)
            self.talk.settle()

    def push_unsubscribe(self, place: int, name: bytes) -> None:
        if self.pushers:
            pipe, reader = self.pushers[place % len(self.pushers)]
            pipe.deliver(rqueue_client.remove(name))
            self.bus.turn()
            reader.topics.discard(name)

    def publish(self, place: int, messages: Sequence[tuple[bytes, bytes]]) -> None:
        if not self.pushers:
            return
        pipe, _ = self.pushers[place % len(self.pushers)]
        pipe.deliver(b"".join(rqueue_client.publish(*one) for one in messages))
        self.bus.turn()
        for name in dict.fromkeys(name for name, _ in messages):
            self.visit(TopicEvent.COLLECT, name)
        self.model.publish(messages)
        self.talk.settle()

    def push_end(self, place: int) -> None:
        if self.pushers:
            pipe, reader = self.pushers.pop(place % len(self.pushers))
            pipe.hang_up()
            self.bus.turn()
            compare_push(pipe, reader)
            self.model.push_readers.remove(reader)

    # --- invariants

    def check(self) -> None:
        for pair in [pair for pair in self.pairs if not pair.is_over]:
            if pair.model.closing and not pair.model.gone:
                assert pair.pipe.closed
                if not pair.model.written:
                    self.end(pair)
            self.compare(pair)
        for pipe, reader in self.pushers:
            compare_push(pipe, reader)
        stats = self.bus.broker.stats()
        assert stats["messages"]["received"] == self.model.received
        assert stats["dropped"] == {reason: n for reason, n in self.model.dropped.items() if n}
        pushed = sum(len(reader.topics) for _, reader in self.pushers)
        assert stats["subscriptions"] == len(self.model.subscriptions()) + pushed
        detached = {"detached": len(self.model.detached), "evicted": self.model.evicted}
        assert detached.items() <= stats["freud"].items()
        self.check_quotas()
        topics = self.bus.topics._topics
        for name in NAMES:
            state = TopicState(topics[name].state) if name in topics else TopicState.GONE
            assert state.name.lower() == self.model.state(name), name
            assert state is state_by_contents(topics.get(name)), name

    def check_quotas(self) -> None:
        for uid in {caller.uid for caller in CALLERS}:
            for quota in QUOTAS:
                used = self.bus.broker.quotas.used(uid, quota)
                assert used == self.model.used(uid, quota), (uid, quota)

    def leave(self) -> None:
        """End all clients. Then no state is left and no quota is charged."""
        for pair in self.pairs:
            if pair.is_open:
                self.end(pair)
        while self.pushers:
            self.push_end(0)
        self.check()
        self.pass_time(TIMEOUT_S + DETACHED_S)
        self.check()
        left = [one for one in self.bus.broker.quotas.accounts() if one["quota"] != TOPICS]
        assert left == []
        assert self.bus.stats("subscriptions") == 0
        assert self.bus.stats("connections", "open") == 0

    # --- inside

    def wall_ns(self) -> int:
        """The model's own clock: time passes for the bus first."""
        return int(self.talk.now_s * 1e9) + self.bus.wall_ahead_ns

    def several(self) -> bool:
        """Return True if enough clients stay after one has left."""
        return sum(pair.may_send for pair in self.pairs) > 2

    def one(self, place: int, suits: Callable[[Pair], bool]) -> Pair | None:
        found = [pair for pair in self.pairs if suits(pair)]
        return found[place % len(found)] if found else None

    def key(self, place: int) -> bytes:
        """A subscriber id, the latest first."""
        if not self.known or place == FORGED:
            return freud_client.FORGED_SUBSCRIBER
        return self.known[-1 - place % len(self.known)]

    def say(self, *requests: bytes) -> None:
        self.deliver(self.pairs[0], b"".join(requests))
        self.compare(self.pairs[0])

    def deliver(self, pair: Pair, data: bytes) -> None:
        for asked in scan(pair.model.held + data, MAX_FRAME_BYTES)[1]:
            self.foresee(asked)
        pair.pipe.deliver(data)
        self.bus.turn()
        self.talk.deliver(pair.model, data)

    def foresee(self, asked: One) -> None:
        if isinstance(asked, Produce):
            self.visit(TopicEvent.PRODUCE, asked.topic)
        elif isinstance(asked, Request) and asked.type in VERBS:
            self.visit(VERBS[asked.type], asked.subject)

    def visit(self, event: TopicEvent, name: bytes) -> None:
        self.visited[event, TopicState[self.model.state(name).upper()]] += 1

    def end(self, pair: Pair) -> None:
        pair.pipe.hang_up()
        self.bus.turn()
        self.talk.end(pair.model)

    def compare(self, pair: Pair) -> None:
        found, size = freud_client.answers_in(pair.pipe.taken[pair.compared_bytes :])
        expected = pair.model.heard[pair.compared :]
        assert len(found) == len(expected), (pair.pipe.peer, found, expected)
        for answer, reply in zip(found, expected, strict=True):
            wanted = freud_client.Answer(reply.code, self.payload(reply, answer.payload))
            assert answer == wanted, (pair.pipe.peer, answer, wanted)
        pair.compared += len(found)
        pair.compared_bytes += size
        rest = len(pair.pipe.taken) - pair.compared_bytes
        assert rest == pair.model.started + pair.model.torn
        pair.is_over = pair.model.gone

    def payload(self, reply: Reply, got: bytes) -> bytes:
        """Return the expected payload. A new subscriber id may be any unused one."""
        if reply.found is None:
            return reply.payload
        assert len(got) == 16
        assert got not in self.talk.ids
        self.talk.ids[got] = reply.found
        self.known.append(got)
        return got


def state_by_contents(topic: EphemeralTopic | None) -> TopicState:
    """Return the state that a topic's incarnations and buffer imply, whatever the table says."""
    if topic is None:
        return TopicState.GONE
    if topic.marked:
        return TopicState.DELETING if topic.current is None else TopicState.RECREATING
    assert topic.current is not None
    return TopicState.AWAITING if topic.current.buffer else TopicState.LIVE


def compare_push(pipe: MemoryPipe, reader: PushReader) -> None:
    assert bytes(pipe.taken) == b"".join(rqueue_client.notification(*one) for one in reader.got)


def policy() -> Policy:
    rules = [Rule.parse(f"deny user:{uid} {verb} {name.decode()}") for uid, verb, name in DENIED]
    made = Policy()
    made.replace([PlacedRule(one, "test", one.who.number) for one in rules])
    return made


def allows(caller: Caller, verb: str, name: bytes, creator: Caller | None) -> bool:
    if (caller.uid, verb, name) in DENIED:
        return False
    return verb != "delete" or caller == creator


def limit(uid: int, quota: str) -> int:
    return OWN_QUOTAS.get(uid, {}).get(quota, QUOTAS[quota])
