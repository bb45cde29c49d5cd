"""Run the same program on a model and on several engines, and compare them.

A step's small numbers are taken modulo the count of existing objects, so that every program
that hypothesis draws or shrinks to is valid. Each begins with a topic and a stage. After each
step the visible state of each engine is compared with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from polybus.errors import PolybusError, UsageError
from polybus.model.stamp import ProducerOptions
from polybus.model.topic import ALL, All
from polybus.testing.conformance import Clock
from tests.property.store.programs import (
    DIGESTS,
    KEYS,
    NAMES,
    PRODUCERS,
    SEALED,
    CommitDraw,
    MarkDraw,
    PutDraw,
    Step,
    WishDraw,
)
from tests.property.store.subject import Subject, compare_rows
from tests.rig.store.model import (
    Content,
    Mark,
    ModelTopic,
    Put,
    Refusal,
    Request,
    Result,
    StoreModel,
    Wish,
)

TIMEOUT_S = 60.0
RECENT = 3  # a step means one of the last few stages or stamped requests

M = TypeVar("M")
T = TypeVar("T")


class Trial:
    def __init__(self, clock: Clock, subjects: Sequence[Subject]) -> None:
        self.clock = clock
        self.subjects = subjects
        self.model = StoreModel(clock)
        self._sent = 0
        self._stamped: list[Request] = []

    def run(self, program: Iterable[Step]) -> None:
        for verb, *arguments in program:
            getattr(self, str(verb))(*arguments)
            for subject in self.subjects:
                subject.compare_all(self.model)

    def _ask(
        self, model: Callable[[], M], engine: Callable[[Subject], T]
    ) -> list[tuple[Subject, M, T]]:
        """Return the results of the model and of each engine, none if all must refuse."""
        try:
            wanted = model()
        except Refusal as refusal:
            for subject in self.subjects:
                _is_refused(subject, partial(engine, subject), refusal)
            return []
        return [(subject, wanted, engine(subject)) for subject in self.subjects]

    # --- topics

    def create(self, name: int, shards: int) -> None:
        settings: dict[str, object] = {"made": len(self.model.topics)}
        for subject, _, topic in self._ask(
            lambda: self.model.create(NAMES[name], shards, settings),
            lambda on: on.store.create(NAMES[name], shards, settings),
        ):
            assert topic.number not in subject.numbers
            subject.numbers.append(topic.number)

    def configure(self, name: int, more: int) -> None:
        settings: dict[str, object] = {"added": more}
        for subject, _, topic in self._ask(
            lambda: self.model.configure(NAMES[name], settings, more),
            lambda on: on.store.configure(NAMES[name], settings, add_shards=more),
        ):
            assert topic in subject.store.topics()

    def drop(self, name: int) -> None:
        self._ask(lambda: self.model.drop(NAMES[name]), lambda on: on.store.drop(NAMES[name]))

    # --- writing

    def tick(self, by_ns: int) -> None:
        self.clock.ns = max(0, self.clock.ns + by_ns)

    def commits(self, draws: Sequence[CommitDraw]) -> None:
        """Submit all commits before waiting for the first."""
        self._commit([self._request(draw) for draw in draws])

    def repeat(self, which: int) -> None:
        """Repeat one of the last stamped requests, as a client without an answer does."""
        known = self._stamped[-RECENT:]
        self._commit(known[which % len(known) :][:1] if known else [])

    def _commit(self, requests: Sequence[Request]) -> None:
        self._stamped += [request for request in requests if request.mark]
        results = [self._result(request) for request in requests]
        for subject in self.subjects:
            futures = [subject.commit(request) for request in requests]
            for wanted, future in zip(results, futures, strict=True):
                if isinstance(wanted, Refusal):
                    _is_refused(subject, partial(future.result, TIMEOUT_S), wanted)
                else:
                    subject.compare_result(wanted, future.result(TIMEOUT_S))

    def _result(self, request: Request) -> Result | Refusal:
        try:
            return self.model.commit(request)
        except Refusal as refusal:
            return refusal

    def open_producer(self, producer: int, dense: bool, kept: int) -> None:
        name = PRODUCERS[producer]
        for _, wanted, found in self._ask(
            lambda: self.model.open_producer(name, dense, kept),
            lambda on: on.store.open_producer(name, ProducerOptions(dense, kept)),
        ):
            assert found == wanted

    def close_producer(self, producer: int, epoch: int) -> None:
        name = PRODUCERS[producer]
        known = self.model.producers.get(name)
        epoch += known.epoch if known else 1
        self._ask(
            lambda: self.model.close_producer(name, epoch),
            lambda on: on.store.close_producer(name, epoch),
        )

    def open_stage(self) -> None:
        for subject, _, name in self._ask(self.model.open_stage, lambda on: on.store.open_stage()):
            assert name not in subject.stages
            subject.stages.append(name)

    def stage(self, stage: int, draws: Sequence[PutDraw]) -> None:
        puts, at = self._puts(draws), self._one_stage(stage)
        self._ask(
            lambda: self.model.stage(at, puts),
            lambda on: on.store.stage(on.stages[at], on.appends(puts)).result(TIMEOUT_S),
        )

    def renew(self, stage: int) -> None:
        at = self._one_stage(stage)
        self._ask(lambda: self.model.renew(at), lambda on: on.store.renew(on.stages[at]))

    def discard(self, stage: int) -> None:
        at = self._one_stage(stage)
        self._ask(lambda: self.model.discard(at), lambda on: on.store.discard(on.stages[at]))

    def trim(self, topic: int, before: dict[int, int]) -> None:
        at = self._one_topic(topic)
        first = min(self.model.topics[at].starts)
        offsets = {shard: offset + first for shard, offset in before.items()}
        self._ask(
            lambda: self.model.trim(at, offsets),
            lambda on: on.store.trim(on.numbers[at], offsets),
        )

    # --- reading

    def read(
        self, topic: int, shard: int | None, start: int, end: int | None, rows: int, size: int
    ) -> None:
        at = self._one_topic(topic)
        for _, wanted, found in self._ask(
            lambda: self.model.read(at, shard, start, end, rows, size),
            lambda on: on.store.read(
                on.numbers[at], _of(shard), start, end, max_rows=rows, max_bytes=size
            ),
        ):
            compare_rows(wanted, found, rows, size)

    def find(self, topic: int, shard: int | None, beside_ns: int) -> None:
        at, time_ns = self._one_topic(topic), self.clock.ns + beside_ns
        for subject, wanted, found in self._ask(
            lambda: self.model.find(at, shard, time_ns),
            lambda on: on.store.find(on.numbers[at], _of(shard), time_ns),
        ):
            assert found == wanted, subject.name

    def find_id(self, topic: int, shard: int, wanted: int) -> None:
        at = self._one_topic(topic)
        for subject, expected, found in self._ask(
            lambda: self.model.find_id(at, shard, wanted),
            lambda on: on.store.find_id(on.numbers[at], shard, wanted),
        ):
            assert found == expected, subject.name

    def scan(self, prefix: bytes, after: bytes, limit: int) -> None:
        for subject, wanted, found in self._ask(
            lambda: self.model.scan(prefix, after, limit),
            lambda on: on.store.scan(prefix, after, limit),
        ):
            assert [record.key for record in found] == wanted, subject.name

    # --- maintenance, which must change nothing

    def reopen(self) -> None:
        for subject in self.subjects:
            if subject.reopen:
                subject.store = subject.reopen()

    def tidy(self) -> None:
        for subject in self.subjects:
            if subject.tidy:
                subject.tidy()

    # --- small numbers of a program to existing topics, stages and records

    def _one_topic(self, draw: int) -> int:
        """Return a handle, mostly of a live topic, sometimes of a dropped one."""
        gone = [at for at, topic in enumerate(self.model.topics) if topic.dropped]
        known = [*self.model.there() * 3, *gone[-1:]]
        return known[draw % len(known)]

    def _one_stage(self, draw: int) -> int:
        count = len(self.model.stages)
        return count - 1 - draw % min(RECENT, count)

    def _puts(self, draws: Sequence[PutDraw]) -> tuple[Put, ...]:
        places = [self._one_topic(draw.topic) for draw in draws]
        return tuple(
            Put(at, _shard(self.model.topics[at], draw.shard), self._contents(draw.shapes))
            for at, draw in zip(places, draws, strict=True)
        )

    def _contents(self, shapes: Iterable[int]) -> tuple[Content, ...]:
        return tuple(self._content(shape) for shape in shapes)

    def _content(self, shape: int) -> Content:
        self._sent += 1
        mine = b"%d" % self._sent
        key = (None, "", f"k{self._sent}")[shape % 3]
        headers = (None, (), (("h", mine), ("", b"")))[shape // 3 % 3]
        return self._sent, key, mine * shape, headers

    def _request(self, draw: CommitDraw) -> Request:
        stages = tuple({self._one_stage(stage) for stage in draw.stages})
        wishes = tuple({wish.key: self._wish(wish) for wish in draw.wishes}.values())
        mark = self._mark(draw.mark) if draw.mark else None
        return Request(self._puts(draw.puts), stages, wishes, mark, b"%d" % self._sent)

    def _wish(self, draw: WishDraw) -> Wish:
        key = KEYS[draw.key]
        current = self.model.records.get(key, (b"", 0))[1]
        expected = (None, current, 0, max(0, current - 1))[draw.expected]
        return Wish(key, draw.value, expected)

    def _mark(self, draw: MarkDraw) -> Mark:
        name = PRODUCERS[draw.producer]
        known = self.model.producers.get(name)
        epoch, last = (known.epoch, known.last) if known else (1, 0)
        beside = max(1, epoch + draw.epoch), max(1, last + draw.counter)
        return Mark(name, *beside, DIGESTS[draw.digest])


def _is_refused(subject: Subject, call: Callable[[], object], refusal: Refusal) -> None:
    try:
        call()
    except PolybusError as error:
        found: PolybusError | None = error
    else:
        found = None
    kind = UsageError if isinstance(found, UsageError) else type(found)
    assert kind in refusal.errors, f"{subject.name}: {found!r}, not {refusal!r}"


def _shard(topic: ModelTopic, draw: int) -> int:
    if draw >= SEALED:
        return 0 if draw == SEALED else len(topic.ends)
    return topic.first_open + draw % topic.generations[-1]


def _of(shard: int | None) -> int | All:
    return ALL if shard is None else shard
