"""Consumer groups by Arrow Flight alone, as another language would use them; real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from tests.rig.flight_client import act, bodies, code_of, connect, produce, refused
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

LONG_MS = 30_000


@pytest.fixture
def bus() -> Iterator[NativeBus]:
    with NativeBus() as made:
        yield made


class Alone:
    """A consumer made of calls."""

    def __init__(self, bus: NativeBus, name: str, **join: object) -> None:
        self.client = connect(bus.process)
        self.who = {"topic": "t", "consumer": name}
        self.who["epoch"] = self.act("join", **join)["epoch"]
        self.held: dict[int, dict[str, int]] = {}

    def act(self, verb: str, **fields: object) -> Any:
        return act(self.client, f"group.{verb}", **self.who, **fields)

    def fetch(self, wait_ms: int = 0) -> list[tuple[dict[str, int], list[bytes]]]:
        """Fetch once. Returns the positions and bodies of the rows."""
        held = [{"shard": shard, **one} for shard, one in self.held.items()]
        asked = {**self.who, "held": held, "wait_ms": wait_ms}
        action = flight.Action("group.fetch", json.dumps(asked).encode())
        first, *rest = self.client.do_action(action)
        answer = json.loads(first.body.to_pybytes())
        assert len(rest) == bool(answer["rows"])
        for shard in answer["lost"]:
            del self.held[shard]
        for one in answer["assigned"]:
            self.held[one["shard"]] = {"epoch": one["epoch"], "next": one["low"]}
        for place in answer["rows"]:
            self.held[place["shard"]]["next"] = place["to"]
        bodies = [body for raw in rest for body in _bodies(raw)]
        cut = [(place, place["to"] - place["from"]) for place in answer["rows"]]
        return [(place, [bodies.pop(0) for _ in range(count)]) for place, count in cut]

    def ack(self, place: dict[str, int], **more: object) -> Any:
        entry = {"shard": place["shard"], "epoch": place["epoch"], **more}
        entry.setdefault("acked", [[place["from"], place["to"]]])
        (answer,) = self.act("ack", shards=[entry])["shards"]
        return answer


def _bodies(result: Any) -> list[bytes]:
    (batch,) = pa.ipc.open_stream(result.body)
    found: list[bytes] = batch.column("body").to_pylist()
    return found


def prepare(bus: NativeBus, shards: int = 2) -> Any:
    client = connect(bus.process)
    act(client, "topic.create", topic="t", shards=shards)
    return client


def test_a_consumer_of_another_language(bus):
    client = prepare(bus, shards=1)
    produce(client, "t", b"a", b"b", b"c")
    one = Alone(bus, "one")
    ((place, found),) = one.fetch(LONG_MS)
    assert found == [b"a", b"b", b"c"]
    assert one.ack(place, acked=[[0, 1]])["low"] == 1
    at = {"shard": 0, "shard_epoch": place["epoch"], "offset": 1}
    output = {"topic": "out", "body": "Yg==", "shard_key": "k", "headers": {"h": "AA=="}}
    assert not one.act("commit", **at, messages=[output])["duplicate"]
    assert one.act("commit", **at, messages=[output])["duplicate"]
    assert bodies(client, topic="out") == [b"b"]
    failed = [{"offset": 2, "reason": "no good", "attempt": attempt} for attempt in range(5)]
    assert one.ack(place, acked=[], failed=failed)["dead"] == [2]
    assert bodies(client, topic="t.dlq") == [b"c"]
    assert one.fetch() == []
    info = act(client, "group.info", topic="t")
    assert [shard["acked"] for shard in info["shards"]] == [3]


def test_a_fetch_waits_and_is_woken_by_a_message_and_by_a_drop(bus):
    client = prepare(bus)
    one = Alone(bus, "one")
    one.fetch()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.fetch, LONG_MS)
        produce(client, "t", b"a")
        assert [found for _, found in waiting.result(30)] == [[b"a"]]
        waiting = pool.submit(one.fetch, LONG_MS)
        act(client, "topic.drop", topic="t")
        with pytest.raises(flight.FlightError) as caught:
            waiting.result(30)
    assert code_of(caught.value) in ("expired", "does_not_exist")
    assert refused(client, "group.heartbeat", **one.who) == "does_not_exist"


def test_a_silent_member_is_dropped_and_its_acks_are_refused(bus):
    client = prepare(bus)
    produce(client, "t", b"a")
    old = Alone(bus, "old", dead_ms=300, heartbeat_ms=100)
    ((place, _),) = old.fetch(LONG_MS)
    until(lambda: not act(client, "group.info", topic="t")["members"], "it is dropped")
    assert refused(old.client, "group.ack", **old.who, shards=[]) == "expired"
    new = Alone(bus, "new")
    ((again, found),) = new.fetch(LONG_MS)
    assert (again["shard"], again["from"], found) == (place["shard"], place["from"], [b"a"])
    assert again["epoch"] > place["epoch"]


def test_members_outlive_a_kill_of_the_bus(bus):
    client = prepare(bus)
    produce(client, "t", b"a")
    one = Alone(bus, "one")
    ((place, _),) = one.fetch(LONG_MS)
    assert one.ack(place)["error"] is None
    bus.kill()
    bus.start()
    one.client = connect(bus.process)
    assert one.act("heartbeat")["assigned"] == [0, 1]
    produce(one.client, "t", b"b")
    ((later, found),) = one.fetch(LONG_MS)
    assert found == [b"b"]
    assert one.ack(later)["error"] is None
    shards = act(one.client, "group.info", topic="t")["shards"]
    assert sum(shard["acked"] for shard in shards) == 2
    assert all(shard["epoch"] == 1 for shard in shards)
