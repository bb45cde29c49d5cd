"""Damaged records and cut files: the bus logs one line, and serves all intact topics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from polybus import freud, gsb, rqueue
from polybus.errors import AlreadyExists, Damaged, Denied, PolybusError, StageGone
from polybus.store.lmdb import store_keys
from tests.golden.goldenbus import (
    HERE,
    READ_CALLS,
    GoldenBus,
    command,
    copied,
    plain_environment,
    wait_until,
)
from tests.rig.store.record_damage import (
    Change,
    change_record,
    cut,
    data_file,
    flip_bit,
    read_records,
    remove,
    topic_numbers,
)

GOLDEN = HERE / "v1"
DAMAGED, INTACT = "orders", "readings"
INTACT_MESSAGES = 30
VERSION_BYTES = 8
CALLS = "gsb.calls"
START_FAILED = 2
FAULT_FOUND = 1


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return copied(GOLDEN / "data", tmp_path / "data")


def names_the_tools(line: str) -> bool:
    return "polybus store verify" in line and "polybus store salvage" in line


# --- a file that is cut off


def serve_once(data: Path, folder: Path) -> Any:
    """Run `polybus serve` on a folder that it must refuse."""
    environment = plain_environment() | {"XDG_RUNTIME_DIR": str(folder)}
    listen = ("--listen", "native=grpc://127.0.0.1:0")
    return command("serve", "--data", str(data), *listen, env=environment)


SIZE_CHECK_OFF = pytest.mark.sabotage(
    "size-check-off", expects="ended by a signal, or did not refuse"
)


@pytest.mark.parametrize("share", [0.75, pytest.param(0.5, marks=SIZE_CHECK_OFF), 0.01, 0.0])
def test_cut_file_is_refused_in_one_line(data, share, tmp_path):
    path = data_file(data)
    os.truncate(path, int(path.stat().st_size * share))
    for done in (
        serve_once(data, tmp_path),
        command("store", "info", str(data), env=plain_environment()),
    ):
        assert done.returncode == START_FAILED, (
            f"ended by a signal, or did not refuse: {done.returncode}, {done.stderr}"
        )
        (line,) = done.stderr.splitlines()
        assert names_the_tools(line), line
        assert "Traceback" not in done.stderr


def test_verify_and_salvage_work_on_a_cut_file(data, tmp_path):
    path = data_file(data)
    os.truncate(path, path.stat().st_size // 2)
    verified = command("store", "verify", str(data), "--json", env=plain_environment())
    assert verified.returncode == FAULT_FOUND, verified
    assert "cut off" in json.loads(verified.stdout)["faults"][0]
    target = tmp_path / "saved"
    saved = command("store", "salvage", str(data), str(target), env=plain_environment())
    assert saved.returncode in (0, FAULT_FOUND), saved
    assert command("store", "verify", str(target), env=plain_environment()).returncode in (
        0,
        FAULT_FOUND,
    )
    assert command("store", "info", str(target), env=plain_environment()).returncode == 0


# --- damaged topics


def topic_key(data: Path, topic: str) -> bytes:
    return store_keys.topic(topic_numbers(data)[topic])


def name_key(_data: Path, topic: str) -> bytes:
    return store_keys.name(topic.encode())


def state_key(data: Path, topic: str) -> bytes:
    return store_keys.state(topic_numbers(data)[topic])


def shard_key(data: Path, topic: str) -> bytes:
    return store_keys.shard_state(topic_numbers(data)[topic], 0)


def first_entry(data: Path, topic: str) -> bytes:
    return min(read_records(data, store_keys.log_of_topic(topic_numbers(data)[topic])))


def last_entry(data: Path, topic: str) -> bytes:
    return max(read_records(data, store_keys.log_of_topic(topic_numbers(data)[topic])))


def lower_next_id(raw: bytes) -> bytes:
    return (1).to_bytes(8, "little") + raw[8:]


def flip_head(raw: bytes) -> bytes:
    return raw[:20] + bytes([raw[20] ^ 1]) + raw[21:]


def lead_elsewhere(raw: bytes) -> bytes:
    number, *rest = json.loads(raw)
    return json.dumps([number - 1, *rest]).encode()


Damage = tuple[Callable[[Path, str], bytes], Change]
# Each topic of the golden folder gets another kind of damage, so that few buses are started.
DAMAGES: list[dict[str, Damage]] = [
    {
        "orders": (topic_key, flip_bit),
        "events": (name_key, cut),
        "news": (state_key, cut),
        CALLS: (shard_key, flip_bit),
        "written": (first_entry, flip_head),
        "readings.copy": (name_key, remove),
    },
    {
        "orders": (topic_key, remove),
        "events": (name_key, lead_elsewhere),
        "news": (state_key, remove),
        CALLS: (shard_key, remove),
        "written": (last_entry, remove),
        "readings.copy": (state_key, lower_next_id),
    },
]


@pytest.mark.sabotage("quarantine-off", expects="the bus did not start|was not refused")
@pytest.mark.parametrize("damages", DAMAGES, ids=["first", "second"])
def test_damaged_topics_are_refused_and_the_others_serve(data, damages):
    keys = {topic: find(data, topic) for topic, (find, _) in damages.items()}
    for topic, (_, change) in damages.items():
        change_record(data, keys[topic], change)
    with GoldenBus(data) as bus:
        bus.run("acl", "add", *READ_CALLS.split())
        with bus.client() as client:
            for topic in damages:
                assert_refused(topic, partial(count, client, topic), "a read")
                if topic == CALLS:  # only the bus writes, creates and removes it
                    continue
                assert_refused(topic, partial(produce, client, topic), "a write")
                with pytest.raises((Damaged, Denied)):  # the creator may be lost
                    client.drop_topic(topic)
                with pytest.raises(AlreadyExists):
                    client.create_topic(topic)
            assert count(client, INTACT) == INTACT_MESSAGES
            produce(client, INTACT)
            assert count(client, INTACT) == INTACT_MESSAGES + 1
        raised = {(alarm["kind"], alarm["object"]): alarm["text"] for alarm in alarms(bus)}
        assert raised.keys() == {("topic_damaged", topic) for topic in damages}
        assert all(map(names_the_tools, raised.values())), raised
        stats = json.loads(bus.run("stats", "--json"))
        assert stats["faults"] == {"topic_damaged": len(damages)}
        assert stats["refused"]["native_damaged"] >= 2 * len(damages) - 1
        logged = [line for line in bus.log().splitlines() if names_the_tools(line)]
        assert all(any(topic in line for line in logged) for topic in damages)
        assert "Traceback" not in bus.log()
        assert bus.stop() == 0


def assert_refused(topic: str, action: Callable[[], object], what: str) -> None:
    try:
        action()
    except Damaged:
        return
    except PolybusError as error:
        raise AssertionError(f"{topic}: {what} was not refused as damaged: {error!r}") from error
    raise AssertionError(f"{topic}: {what} was not refused")


def produce(client: Any, topic: str) -> None:
    with client.producer() as producer:
        producer.produce(topic, [b"new"]).result()


def count(client: Any, topic: str) -> int:
    return sum(batch.num_rows for batch in client.read(topic))


def alarms(bus: GoldenBus) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(bus.run("stats", "--json"))["alarms"]
    return found


def test_every_dialect_refuses_a_damaged_topic(data):
    """Without an answer, a message is dropped and counted; it does not become ephemeral."""
    change_record(data, topic_key(data, DAMAGED), flip_bit)
    with GoldenBus(data) as bus:
        with rqueue.blocking.connect(bus.addresses["rqueue"]) as peer:
            peer.publish(DAMAGED, b"lost")
            with (
                pytest.raises(PolybusError, match="damaged"),
                freud.blocking.connect(bus.addresses["freud"]) as reader,
                reader.subscribe(DAMAGED),
            ):
                pytest.fail("subscribed to a damaged topic")
            with (
                pytest.raises(PolybusError, match="damaged"),
                gsb.blocking.connect(bus.addresses["gsb"]) as caller,
            ):
                caller.broadcast(DAMAGED, b"lost")
            wait_until(lambda: stats_of(bus)["dropped"].get("damaged") == 1, "the dropped message")
        assert bus.stop() == 0


def stats_of(bus: GoldenBus) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bus.run("stats", "--json"))
    return found


def test_store_info_names_a_damaged_topic_and_shows_the_others(data):
    change_record(data, topic_key(data, DAMAGED), flip_bit)
    done = command("store", "info", str(data), env=plain_environment())
    assert done.returncode == FAULT_FOUND, done
    assert any(DAMAGED in line and names_the_tools(line) for line in done.stdout.splitlines())
    assert INTACT in done.stdout
    shown = json.loads(
        command("store", "info", str(data), "--json", env=plain_environment()).stdout
    )
    assert [one["name"] for one in shown["damaged"]] == [DAMAGED]
    assert DAMAGED not in [one["name"] for one in shown["topics"]]


def test_readers_of_a_quarantined_topic_keep_their_records(data):
    """A topic that cannot be read is not a dropped one: its groups come back with it."""
    before = read_records(data)
    key = topic_key(data, DAMAGED)
    change_record(data, key, flip_bit)
    with GoldenBus(data) as bus:
        bus.run("group", "ls")  # waits until groups are loaded
        assert bus.stop() == 0
    change_record(data, key, lambda _: before[key])
    records = {key for key in before if key.startswith(b"rgroup")}
    assert records <= read_records(data).keys()
    with GoldenBus(data) as bus, bus.client() as client:
        assert sum(batch.num_rows for batch in client.read(DAMAGED)) == 80


def test_damage_within_the_log_raises_an_alarm_when_it_is_read(data):
    entries = sorted(read_records(data, store_keys.log_of_shard(topic_numbers(data)[INTACT], 1)))
    assert len(entries) > 1
    change_record(data, entries[0], lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]))
    with GoldenBus(data) as bus:
        with bus.client() as client:
            with pytest.raises(Damaged, match=f"topic '{INTACT}', shard 1, offset"):
                list(client.read(INTACT, 1))
            assert sum(batch.num_rows for batch in client.read(DAMAGED)) == 80
            produce(client, INTACT)  # the rest of the log works on
        wait_until(lambda: alarms(bus), "the alarm")
        (alarm,) = alarms(bus)
        assert (alarm["kind"], alarm["object"]) == ("topic_damaged", INTACT)
        assert names_the_tools(alarm["text"])
        assert json.loads(bus.run("stats", "--json"))["faults"] == {"topic_damaged": 1}


# --- other records


@pytest.mark.parametrize("change", [cut, remove, lambda raw: bytes(len(raw))])
def test_damaged_counters_of_the_store_are_refused_in_one_line(data, change, tmp_path):
    change_record(data, store_keys.COUNTERS, change)
    done = serve_once(data, tmp_path)
    assert done.returncode == START_FAILED, done
    (line,) = done.stderr.splitlines()
    assert "the counters of the store are damaged" in line
    assert names_the_tools(line), line


RECORDS = {
    "roster of a group": b"rgroup/",
    "progress of a group": b"rgroupshard/",
    "mark of removed groups": b"rgroupmark/",
    "position of a pirate client": b"rpirate/last/",
    "subscription of a pirate client": b"rpirate/subscription/",
    "counter of a pirate client": b"rpirate/counter/",
    "owner of a producer": b"rowner/",
    "last use of a producer": b"rseen/",
    "producer": store_keys.PRODUCERS,
    "result of a producer": store_keys.RESULTS,
    "stage": store_keys.STAGES,
    "progress of a query": b"rquery",
}


def change_after(skipped: int, change: Callable[[bytes], bytes], raw: bytes) -> bytes:
    return raw[:skipped] + change(raw[skipped:])


@pytest.mark.parametrize("change", [cut, flip_bit], ids=["cut", "flipped"])
def test_damaged_records_of_readers_and_writers_harm_no_other(data, change):
    for record, prefix in RECORDS.items():
        found = [key for key in read_records(data) if key.startswith(prefix)]
        assert found, f"the golden folder has no {record}"
        # The first 8 bytes of a record are its version, which no reader decodes.
        skipped = VERSION_BYTES if prefix.startswith(store_keys.RECORDS) else 0
        change_record(data, found[0], partial(change_after, skipped, change))
    with GoldenBus(data) as bus:
        with bus.client() as client:
            for topic in (INTACT, "news"):
                before = count(client, topic)
                produce(client, topic)
                assert count(client, topic) == before + 1
            bus.run("group", "ls")
        assert "Traceback" not in bus.log(), bus.log()
        assert "unexpected" not in bus.log(), bus.log()
        assert bus.stop() == 0


def test_damaged_stage_is_gone(data):
    expected = json.loads((GOLDEN / "expected.json").read_text())["stage"]
    stage = expected["stage"]
    held = next(
        key
        for key in read_records(data, store_keys.stage(int(stage, 16)))
        if len(key) > len(store_keys.stage(0))
    )
    change_record(data, held, lambda raw: (999).to_bytes(8, "little") + raw[8:])
    with GoldenBus(data) as bus:
        with bus.client() as client, pytest.raises(StageGone):
            client.act("stage.publish", stages=[stage])
        assert "damaged" in bus.log()
