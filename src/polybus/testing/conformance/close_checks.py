"""Checks of `close`: submitted requests are finished, later calls are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from polybus.errors import StoreClosed
from polybus.model.commit import Commit
from polybus.model.stamp import ProducerOptions
from polybus.model.topic import Topic
from polybus.store.contract import Store
from polybus.testing.conformance.kit import TIMEOUT_S, Engine, append, bodies, put, refused


def _calls(store: Store, topic: Topic, stage: str) -> list[Callable[[], object]]:
    """Return a call of every method but `close`."""
    return [
        lambda: store.create("u", 1, {}),
        lambda: store.configure("t", {}),
        store.topics,
        lambda: store.drop("t"),
        lambda: put(store),
        lambda: store.open_producer("p", ProducerOptions()),
        lambda: store.look_up_producer("p"),
        lambda: store.close_producer("p", 1),
        store.open_stage,
        lambda: store.stage(stage, []).result(TIMEOUT_S),
        lambda: store.staged_topics([stage]),
        lambda: store.renew(stage),
        lambda: store.discard(stage),
        lambda: store.trim(topic.number, {}),
        lambda: store.bounds(topic.number),
        lambda: store.read(topic.number, 0, 0),
        lambda: store.find(topic.number, 0, 0),
        lambda: store.get(b"k"),
        lambda: store.scan(b""),
        lambda: store.watch(lambda news: None),
    ]


def check_calls_after_close_are_refused(engine: Engine) -> None:
    store = engine.fresh()
    topic, stage = store.create("t", 1, {}), store.open_stage()
    store.open_producer("p", ProducerOptions())
    store.close()
    for call in _calls(store, topic, stage):
        with refused(StoreClosed):
            call()


def check_errors_after_close_come_by_the_future(engine: Engine) -> None:
    store = engine.fresh()
    store.close()
    assert isinstance(store.commit(Commit()).exception(TIMEOUT_S), StoreClosed)
    assert isinstance(store.stage("s", []).exception(TIMEOUT_S), StoreClosed)


def check_close_finishes_submitted_commits(engine: Engine) -> None:
    store = engine.fresh()
    topic = store.create("t", 1, {})
    futures = [store.commit(Commit((append(topic, 0, b"x"),))) for _ in range(50)]
    store.close()
    assert all(future.done() for future in futures)
    assert [future.result().spans[0].first_id for future in futures] == list(range(1, 51))


def check_closing_again_does_nothing(engine: Engine) -> None:
    store = engine.fresh()
    stop = store.watch(lambda news: None)
    store.close()
    store.close()
    stop()
    with store:
        pass


def check_with_closes(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        put(store, append(topic, 0, b"x"))
        assert bodies(store, topic) == [b"x"]
    with refused(StoreClosed):
        store.topics()


def check_child_of_a_fork_is_refused(engine: Engine) -> None:
    with engine.fresh() as store:
        topic, stage = store.create("t", 1, {}), store.open_stage()
        child = os.fork()
        if child == 0:
            # An engine that hangs here must not leave a process behind.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(TIMEOUT_S))
            os._exit(_all_refused(_calls(store, topic, stage)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        put(store, append(topic, 0, b"x"))
        assert bodies(store, topic) == [b"x"]


def _all_refused(calls: list[Callable[[], object]]) -> int:
    """Return 0 if each call was refused, else an exit code that names the first other call."""
    for number, call in enumerate(calls, 1):
        try:
            call()
        except StoreClosed:
            continue
        except BaseException:
            return 100 + number
        return number
    return 0
