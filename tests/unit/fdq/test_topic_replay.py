"""Replay of a range in id order, by id and by time, without a group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from polybus import errors, fdq
from polybus.dialects.fdq.client.topic_replay import shard_indexes, to_nanoseconds
from polybus.native import Client
from polybus.native.inprocess import open_bus
from tests.rig.native_bus import count_waits
from tests.rig.observer import until

PATIENCE_S = 30
COUNT = 40


ENGINES = ["memory", "lmdb"]


@contextmanager
def filled(where: str) -> Iterator[str]:
    """A store with a topic of forty messages in forty commits."""
    with open_bus(where), fdq.Producer(where) as producer:
        for n in range(1, COUNT + 1):
            producer.produce("t", f"k{n % 5}", b"%d" % n)
        yield where


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with filled(f"{request.param}:{tmp_path / 'store'}") as where:
        yield where


@pytest.fixture(scope="module", params=ENGINES)
def history(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The same store, shared by tests that only read."""
    with filled(f"{request.param}:{tmp_path_factory.mktemp('history') / 'store'}") as where:
        yield where


def ids(url: str, **settings: Any) -> list[int]:
    return [envelope.id for envelope in fdq.replay(url, "t", **settings)]


def times(url: str) -> list[int]:
    return [envelope.timestamp_ns for envelope in fdq.replay(url, "t")]


def test_replay_of_all_messages(history: str) -> None:
    found = list(fdq.replay(history, "t"))
    assert [one.id for one in found] == list(range(1, COUNT + 1))
    assert [int(one.message) for one in found] == [one.id for one in found]
    assert {one.shard_epoch for one in found} == {0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"from_id": 0}, range(1, 41)),
        ({"from_id": 39}, range(39, 41)),
        ({"from_id": 41}, []),
        ({"from_id": 1000}, []),
        ({"to": 3}, range(1, 3)),
        ({"to": 0}, []),
        ({"from_id": 10, "to": 12}, range(10, 12)),
        ({"from_id": 12, "to": 12}, []),
        ({"from_id": 12, "to": 10}, []),
        ({"from_id": 38, "to": 1000}, range(38, 41)),
    ],
)
def test_replay_by_id(history: str, settings: dict[str, int], expected: Any) -> None:
    assert ids(history, **settings) == list(expected)


def test_replay_by_time(history: str) -> None:
    """A time selects the first message at or after it; `to` is exclusive."""
    at = times(history)
    first, last = at.index(at[9]) + 1, at.index(at[29]) + 1  # commits may share a time
    assert ids(history, from_time=at[9]) == list(range(first, COUNT + 1))
    assert ids(history, from_time=at[9], to=at[29]) == list(range(first, last))
    assert ids(history, from_time=0) == list(range(1, COUNT + 1))
    assert ids(history, from_time=at[-1] + 1) == []


def test_replay_by_datetime(history: str) -> None:
    long_ago = datetime(2000, 1, 1, tzinfo=UTC)
    hence = datetime.now(UTC) + timedelta(days=1)
    everything = list(range(1, COUNT + 1))
    assert ids(history, from_time=long_ago) == everything
    assert ids(history, from_time=hence) == []
    assert ids(history, to=long_ago) == []
    assert ids(history, from_id=5, to=hence) == everything[4:]
    assert ids(history, from_time=long_ago, to=hence) == everything


def test_datetime_to_nanoseconds() -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
    assert to_nanoseconds("t", moment) == 1769860800_123456_000
    elsewhere = moment.astimezone(timezone(timedelta(hours=5, minutes=45)))
    assert to_nanoseconds("t", elsewhere) == 1769860800_123456_000


def test_replay_of_batches(history: str) -> None:
    batches = list(fdq.replay(history, "t", from_id=5, batch=True))
    assert sum(batch.num_rows for batch in batches) == COUNT - 4
    assert batches[0].schema.names[0] == "id"


@pytest.mark.parametrize(
    "bad",
    [
        {"from_id": 1, "from_time": 1},
        {"from_id": -1},
        {"from_id": True},
        {"from_id": "1"},
        {"from_id": 2**63},
        {"to": 1.5},
        {"from_time": datetime(2026, 1, 1)},  # noqa: DTZ001  # just that
        {"from_time": datetime(1960, 1, 1, tzinfo=UTC)},
        {"from_time": "yesterday"},
        {"wait_s": -1},
        {"wait_s": math.nan},
    ],
)
def test_invalid_positions_are_refused(history: str, bad: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        fdq.replay(history, "t", **bad)


def test_replay_of_missing_topics_fails(history: str) -> None:
    with pytest.raises(errors.DoesNotExist):
        fdq.replay(history, "nowhere")


def test_replay_ends_with_the_last_message_at_its_start(url: str) -> None:
    with fdq.replay(url, "t") as replay, fdq.Producer(url) as producer:
        producer.produce("t", "k", b"later")
        assert len(list(replay)) == COUNT


def test_replay_waits_for_new_messages_with_wait_s(url: str) -> None:
    with ThreadPoolExecutor(1) as pool, fdq.Producer(url) as producer:
        replay = fdq.replay(url, "t", from_id=COUNT, wait_s=math.inf)
        assert next(replay).id == COUNT
        following = pool.submit(next, replay)
        producer.produce("t", "k", b"news")
        assert following.result(PATIENCE_S).message == b"news"
        ended = pool.submit(list, replay)
        replay.cancel()
        assert ended.result(PATIENCE_S) == []


def test_replay_disconnects_at_its_end(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'store'}"
    with fdq.Producer(url) as producer:
        producer.produce_batch("t", [("k", b"x")] * 10)
    assert len(list(fdq.replay(url, "t"))) == 10
    left = fdq.replay(url, "t")
    next(left)
    left.close()
    left.close()
    assert list(left) == []
    with fdq.replay(url, "t"):
        pass
    with pytest.raises(errors.DoesNotExist):
        fdq.replay(url, "nowhere")
    from polybus.store import folder_ownership

    assert folder_ownership.owner(tmp_path / "store") is None


def test_replay_moves_no_group(history: str) -> None:
    with open_bus(history) as bus:
        assert ids(history)
        assert bus.act("topic.stats", topic="t")["groups"] == []


def test_trimmed_messages_are_skipped(url: str) -> None:
    with open_bus(url) as bus:
        shard = next(iter(fdq.replay(url, "t"))).shard
        kept = [one.id for one in fdq.replay(url, "t") if one.shard != shard or one.offset >= 2]
        bus.act("topic.trim", topic="t", before={str(shard): 2})
        assert ids(url) == kept


def test_shard_indexes_restart_with_each_generation() -> None:
    assert shard_indexes([2, 3]) == [0, 1, 0, 1, 2]


# --- stats and reset


@pytest.fixture
def bus(url: str) -> Iterator[Client]:
    with open_bus(url) as opened:
        yield opened


def test_stats(history: str) -> None:
    found = fdq.stats(history, "t")
    assert found["all"]["inserted"] == found["all"]["routed"] == COUNT
    with pytest.raises(errors.DoesNotExist):
        fdq.stats(history, "nowhere")


def low(bus: Client) -> dict[int, int]:
    info = bus.act("group.info", topic="t", group="default")
    return {one["shard"]: one["low"] for one in info["shards"]}


def test_reset_moves_a_group(url: str, bus: Client) -> None:
    joined = bus.act("group.join", topic="t", consumer="c")
    with pytest.raises(errors.Refused):
        fdq.reset(url, "t", to="latest")
    fdq.reset(url, "t", to="latest", force=True)
    bounds = bus.act("bounds", topic="t")["shards"]
    ends = {one["shard"]: one["end"] for one in bounds if one["end"]}
    assert {shard: at for shard, at in low(bus).items() if at} == ends
    fdq.reset(url, "t", "default", to="earliest", force=True)
    assert not any(low(bus).values())
    shard = next(iter(ends))
    fdq.reset(url, "t", to={shard: 2}, force=True)
    assert low(bus)[shard] == 2
    fdq.reset(url, "t", to=COUNT + 1, force=True)
    assert {shard: at for shard, at in low(bus).items() if at} == ends
    fdq.reset(url, "t", to=datetime(2000, 1, 1, tzinfo=UTC), force=True)
    assert not any(low(bus).values())
    assert joined["epoch"] == 1


@pytest.mark.parametrize("bad", ["somewhere", -1, 1.5, {"x": 1}, {0: -1}, None])
def test_invalid_reset_positions_are_refused(bad: Any) -> None:
    with pytest.raises(errors.UsageError):
        fdq.reset("memory:", "t", to=bad)


def test_waiting_replay_does_not_block_producers(history: str) -> None:
    with open_bus(history) as bus, ThreadPoolExecutor(1) as pool:
        replay = fdq.replay(history, "t", from_id=COUNT + 1, wait_s=math.inf)
        waiting = pool.submit(next, replay, None)
        until(lambda: count_waits(bus), "the replay to wait")
        replay.cancel()
        assert waiting.result(PATIENCE_S) is None
