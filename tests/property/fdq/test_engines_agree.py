"""A program behaves equally on every in-process bus: `memory:` and `lmdb:`.

Both run the same steps. Each step must return the same result or error, and the topics must
have the same content at the end, except for timestamps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from polybus import fdq
from polybus.errors import PolybusError
from polybus.native import Client
from polybus.native.inprocess import open_bus

ONE, MANY = ("one-a", "one-b"), ("many-a", "many-b")
TOPICS = ONE + MANY
SHARDS = {**dict.fromkeys(ONE, 1), **dict.fromkeys(MANY, 5)}
NAMES = ("importer", "exporter")
EXAMPLES = 25

keys = st.one_of(
    st.none(),
    st.sampled_from(["", "a", "b", "customer-7"]),
    st.text(max_size=3),
    st.sampled_from(["k" * 1024, "k" * 1025, "\ud800"]),
)
bodies = st.binary(max_size=20)
headers = st.one_of(
    st.none(), st.dictionaries(st.text("ab", max_size=2), st.binary(max_size=3), max_size=2)
)
requests = st.builds(fdq.MessageRequest, keys, bodies, headers)
topics = st.sampled_from(TOPICS)

steps = st.one_of(
    st.tuples(st.just("produce"), st.sampled_from(NAMES), topics, requests),
    st.tuples(st.just("batch"), st.sampled_from(NAMES), topics, st.lists(requests, max_size=6)),
    # Batching depends on timing, so only where the ids do not show it.
    st.tuples(
        st.just("run"),
        st.sampled_from(NAMES),
        st.sampled_from(ONE),
        st.lists(requests, min_size=1, max_size=8),
    ),
    st.tuples(st.just("open"), st.sampled_from(NAMES)),
    st.tuples(st.just("trim"), topics, st.integers(0, 4), st.integers(0, 5)),
    # The next produce creates it again, with sixteen shards.
    st.tuples(st.just("drop"), st.sampled_from(MANY)),
    st.tuples(st.just("create"), topics),
    st.tuples(st.just("replay"), topics, st.integers(0, 20), st.integers(0, 20)),
)


class World:
    """One bus and the producers of a program. Older producers stay open, to be fenced."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self.bus: Client = stack.enter_context(open_bus(url))
        self._stack = stack
        self._producers: dict[str, list[fdq.Producer]] = {}
        for topic in TOPICS:
            self.create(topic)
        for name in NAMES:
            self.open(name)

    def take(self, step: tuple[Any, ...]) -> Any:
        """Return the result of a step, or its error."""
        verb, *given = step
        act: Callable[..., Any] = getattr(self, verb)
        try:
            return act(*given)
        except PolybusError as error:
            return type(error).__name__

    def open(self, name: str) -> int:
        producer = self._stack.enter_context(fdq.Producer(self.url, name))
        self._producers.setdefault(name, []).append(producer)
        return producer.epoch

    def produce(self, name: str, topic: str, request: fdq.MessageRequest) -> Any:
        """Produce by the first producer of the name, which may be fenced, and by the last."""
        by = {id(one): one for one in self._both(name)}
        return [self._told(partial(one.produce, topic, *request)) for one in by.values()]

    def batch(self, name: str, topic: str, batch: list[fdq.MessageRequest]) -> Any:
        return self._both(name)[1].produce_batch(topic, batch)

    def run(self, name: str, topic: str, batch: list[fdq.MessageRequest]) -> Any:
        producer = self._both(name)[1]
        futures = []
        refused = []
        for request in batch:
            try:
                futures.append(producer.produce_nowait(topic, *request))
            except PolybusError as error:
                refused.append(type(error).__name__)
        producer.flush()
        return [str(one.exception()) for one in futures], refused

    def trim(self, topic: str, shard: int, offset: int) -> Any:
        bounds = self.bus.act("topic.trim", topic=topic, before={str(shard): offset})
        return bounds["first_id"], bounds["next_id"]

    def drop(self, topic: str) -> None:
        self.bus.act("topic.drop", topic=topic)

    def create(self, topic: str) -> None:
        self.bus.act("topic.create", topic=topic, shards=SHARDS[topic])

    def replay(self, topic: str, start: int, end: int) -> Any:
        return self.contents(topic, from_id=start, to=end)

    def contents(self, topic: str, **bounds: Any) -> list[Any]:
        return [
            (one.id, one.shard, one.offset, one.shard_key, one.message, one.headers)
            for one in fdq.replay(self.url, topic, **bounds)
        ]

    def _both(self, name: str) -> tuple[fdq.Producer, fdq.Producer]:
        return self._producers[name][0], self._producers[name][-1]

    def _told(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PolybusError as error:
            return type(error).__name__


@settings(max_examples=EXAMPLES)
@given(st.lists(steps, max_size=25))
def test_same_steps_give_equal_results_on_all_engines(program: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        worlds = [
            World(url, stack) for url in (f"memory:{folder}", f"lmdb:{Path(folder) / 'store'}")
        ]
        for step in program:
            first, second = [world.take(step) for world in worlds]
            assert first == second, step
        for topic in TOPICS:
            first, second = [world.take(("contents", topic)) for world in worlds]
            assert first == second, topic
