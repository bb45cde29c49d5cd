"""Open a copy of each golden folder, compare it with expected.json, and go on from there.

`make.py` describes the contents of the folders. The Spark checkpoints and the archive are continued
in `tests/spark/test_golden_checkpoints.py`, which shares the session of the Spark tests.
Record keys, error codes, counter names and config keys are formats: if a test here turns
red after a rename, the rename is wrong, not the golden data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybus import native, pirate
from polybus.errors import Fenced
from polybus.spark.archive.archive_folder import MARK
from polybus.spark.archive.archive_folder import VERSION as ARCHIVE_VERSION
from polybus.store.lmdb.stored_values import FORMAT_VERSION
from tests.golden import goldenread
from tests.golden.goldenbus import (
    HERE,
    READ_CALLS,
    VERSIONS,
    GoldenBus,
    command,
    copied,
    plain_environment,
    wait_until,
)

PLACE = ("shard", "offset")


@pytest.fixture(scope="module", params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param)


@pytest.fixture(scope="module")
def expected(golden: Path) -> Any:
    return json.loads((golden / "expected.json").read_text())


def bus_on_copy(
    golden: Path, factory: pytest.TempPathFactory, **settings: str
) -> Iterator[GoldenBus]:
    data = copied(golden / "data", factory.mktemp("golden") / "data")
    with GoldenBus(data, env=settings) as bus:
        bus.run("acl", "add", *READ_CALLS.split())
        yield bus
        assert bus.stop() == 0


@pytest.fixture(scope="module")
def unchanged(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenBus]:
    """A bus for tests that only read."""
    yield from bus_on_copy(golden, tmp_path_factory)


@pytest.fixture(scope="module")
def continued(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenBus]:
    """A bus for tests that write, each with topics, groups and producers of its own."""
    yield from bus_on_copy(golden, tmp_path_factory, POLYBUS_GSB_AUDIT="true")


@pytest.fixture(scope="module")
def unopened(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenBus]:
    """A bus without new producers: opening one removes anonymous producers unused for a week."""
    yield from bus_on_copy(golden, tmp_path_factory)


@pytest.fixture
def client(continued: GoldenBus) -> Iterator[native.Client]:
    with continued.client() as client:
        yield client


def test_current_formats_have_a_golden_folder():
    """A new format version adds a folder."""
    stores = {(HERE / one / "data/store/CURRENT").read_text().splitlines()[0] for one in VERSIONS}
    marks = [json.loads((HERE / one / "archive" / MARK).read_text()) for one in VERSIONS]
    assert f"polybus store {FORMAT_VERSION}" in stores
    assert ARCHIVE_VERSION in [mark["version"] for mark in marks]


# --- the state, as it is


def test_topics_hold_the_expected_messages(unchanged, expected):
    with unchanged.client() as client:
        state = goldenread.bus_state(client)
    assert sorted(state["topics"]) == sorted(expected["topics"])
    for topic, found in expected["topics"].items():
        now = state["topics"][topic]
        # Newer versions have more counts.
        now["counts"] = {key: now["counts"][key] for key in found["counts"]}
        assert now == found, topic


def test_groups_stand_where_they_stood(unchanged, expected):
    with unchanged.client() as client:
        state = goldenread.bus_state(client)
    assert state["groups"] == expected["groups"]


def test_dead_letters_name_their_origin(unchanged, expected):
    with unchanged.client() as client:
        (letter,) = goldenread.rows(client, "orders.dlq")
        origin = {name: value.decode() for name, value in letter["headers"]}
        (message,) = client.read(
            origin["polybus.topic"],
            int(origin["polybus.shard"]),
            int(origin["polybus.offset"]),
            max_rows=1,
        )
    assert message.column("body").to_pylist() == [letter["body"]]
    assert message.column("id").to_pylist() == [int(origin["polybus.id"])]
    assert (origin["polybus.group"], origin["polybus.deliveries"]) == ("billing", "3")


def test_log_of_calls_is_readable(unchanged):
    with unchanged.client() as client:
        calls = [json.loads(row["body"]) for row in goldenread.rows(client, "gsb.calls")]
    assert [(one["address"], one["code"]) for one in calls] == [("sys/ping", 0), ("nobody", 404)]


def test_log_of_calls_goes_on(continued, client, expected):
    before = expected["topics"]["gsb.calls"]["next_id"]
    continued.run("gsb", "call", "sys/ping", '"again"', "--at", continued.addresses["gsb"])
    wait_until(lambda: client.bounds("gsb.calls")["next_id"] == before + 1, "the call in the log")
    (call,) = goldenread.rows(client, "gsb.calls", start=before)
    assert json.loads(call["body"])["address"] == "sys/ping"


def test_store_files_are_whole_and_readable_without_a_bus(golden, expected, tmp_path):
    data = str(copied(golden / "data", tmp_path / "data"))
    verified = command("store", "verify", data, "--json", env=plain_environment())
    assert verified.returncode == 0, verified.stdout
    shown = command("inspect", "--store", data, "--json", "--every", env=plain_environment())
    paths = [json.loads(line)["path"] for line in shown.stdout.splitlines()]
    for topic, found in expected["topics"].items():
        stored = [path for path in paths if path.startswith(f"fdq/topic/{topic}/all/data/")]
        assert len(stored) == len(found["messages"]), topic


# --- groups go on


def acked_places(progress: dict[str, Any]) -> set[tuple[int, int]]:
    return {
        (int(shard), offset)
        for shard, ranges in progress["acked"].items()
        for first, end in ranges
        for offset in range(first, end)
    }


def all_places(expected: dict[str, Any], topic: str) -> set[tuple[int, int]]:
    bounds = expected["topics"][topic]["bounds"]
    return {(shard, offset) for shard, start, end in bounds for offset in range(start, end)}


class Member:
    """A member of a group, made of calls of the native port."""

    def __init__(self, client: native.Client, topic: str, group: str, consumer: str) -> None:
        self._client = client
        self._who: dict[str, Any] = {"topic": topic, "group": group, "consumer": consumer}
        self.assigned: dict[int, dict[str, Any]] = {}

    def join(self, **options: Any) -> int:
        self._who["epoch"] = self._client.act("group.join", **self._who, **options)["epoch"]
        return int(self._who["epoch"])

    def resume(self, epoch: int) -> None:
        """Go on with an epoch from before the restart of the bus."""
        self._who["epoch"] = epoch

    def fetch_all(self) -> set[tuple[int, int]]:
        """Fetch up to the end of all shards. Returns the places of rows that are not acked."""
        nexts: dict[int, int] = {}
        places: set[tuple[int, int]] = set()
        while True:
            held = [
                {"shard": shard, "epoch": self.assigned[shard]["epoch"], "next": offset}
                for shard, offset in nexts.items()
            ]
            answer, batches = self._client.fetch(**self._who, held=held)
            for one in answer["assigned"]:
                self.assigned[one["shard"]] = one
                nexts[one["shard"]] = one["low"]
            for one in answer["rows"]:
                nexts[one["shard"]] = one["to"]
            for batch in batches:
                rows = batch.select(list(PLACE)).to_pylist()
                places |= {(row["shard"], row["offset"]) for row in rows}
            if not answer["assigned"] and not answer["rows"]:
                return {place for place in places if not self._is_acked(*place)}

    def ack(self, shard: int, **report: Any) -> dict[str, Any]:
        entry = {"shard": shard, "epoch": self.assigned[shard]["epoch"], **report}
        (judged,) = self._client.act("group.ack", **self._who, shards=[entry])["shards"]
        assert judged.get("error") is None, judged
        return dict(judged)

    def _is_acked(self, shard: int, offset: int) -> bool:
        one = self.assigned[shard]
        in_range = any(first <= offset < end for first, end in one["ranges"])
        return bool(offset < one["low"] or in_range)


def test_member_goes_on_after_the_restart(client, expected):
    """Its epoch, shard epochs, acks, failed runs and max_deliver are on disk."""
    before = expected["members"]["orders/billing"]
    letters = len(expected["topics"]["orders.dlq"]["messages"])
    member = Member(client, "orders", "billing", before["consumer"])
    member.resume(before["epoch"])
    places = member.fetch_all()
    epochs = {str(shard): one["epoch"] for shard, one in member.assigned.items()}
    assert epochs == before["shard_epochs"]
    attempts = {
        str(shard): one["attempts"] for shard, one in member.assigned.items() if one["attempts"]
    }
    assert attempts == before["attempts"]
    unacked = all_places(expected, "orders") - acked_places(before)
    assert places == unacked

    # The third failed run makes a dead letter; all other messages are acked.
    ((shard, failed),) = before["attempts"].items()
    ((offset, attempt),) = failed.items()
    report = {"offset": int(offset), "reason": "golden again", "attempt": attempt}
    member.ack(int(shard), failed=[report])
    for place in sorted(unacked - {(int(shard), int(offset))}):
        member.ack(place[0], acked=[[place[1], place[1] + 1]])
    info = goldenread.group_state(client, "orders", "billing")
    assert [one["lag"] for one in info["shards"]] == [0, 0, 0, 0]
    found = goldenread.rows(client, "orders.dlq")
    assert len(found) == letters + 1
    assert (
        dict(found[-1]["headers"])["polybus.reason"],
        dict(found[-1]["headers"])["polybus.deliveries"],
    ) == (b"golden again", b"3")


def test_group_without_members_goes_on_from_its_position(continued, expected):
    """By the command line: unacked messages come once, acked ones never."""
    consume = ("fdq", "consume", "orders", "--group", "audit", "--exit", "--json")
    rows = [json.loads(line) for line in continued.run(*consume).splitlines()]
    places = sorted((row["shard"], row["offset"]) for row in rows)
    acked = acked_places(expected["members"]["orders/audit"])
    assert places == sorted(all_places(expected, "orders") - acked)
    bodies = {(row[1], row[2]): row[6] for row in expected["topics"]["orders"]["messages"]}
    for row in rows:
        assert goldenread.digest(row["body"].encode()) == bodies[row["shard"], row["offset"]]
    assert continued.run(*consume) == ""


def test_group_that_started_at_the_end_gets_only_newer_messages(unopened, expected):
    with unopened.client() as client:
        member = Member(client, "orders", "latest", "latest-2")
        member.join()
        assert member.fetch_all() == set()
        ends = {shard: end for shard, _, end in expected["topics"]["orders"]["bounds"]}
        assert {shard: one["low"] for shard, one in member.assigned.items()} == ends


def test_group_made_again_has_a_later_epoch(client, expected):
    before = expected["removed_group"]
    epoch = Member(client, before["topic"], before["group"], "removed-1").join()
    assert epoch == before["epoch"] + 1


# --- producers and stages go on


def stamped(producer: dict[str, Any], counter: int, name: str) -> dict[str, Any]:
    return {"producer": name, "epoch": producer["epoch"], "counter": counter}


def assert_repeat_is_known(bus: GoldenBus, producer: dict[str, Any], name: str) -> None:
    """The last batch, sent again with its stamp, gets its first answer and stores nothing."""
    with bus.flight() as port, bus.client() as client:
        before = client.bounds(producer["topic"])["next_id"]
        stamp = stamped(producer, producer["counter"], name)
        answer = port.produce(producer["topic"], [b"again"], ["again"], stamp)
        assert answer == {
            "counter": producer["counter"],
            "first_id": producer["first_id"],
            "last_id": producer["last_id"],
            "duplicate": True,
        }
        assert client.bounds(producer["topic"])["next_id"] == before


def test_named_producer_goes_on(continued, client, expected):
    importer = expected["producers"]["importer"]
    assert_repeat_is_known(continued, importer, "importer")
    with client.producer("importer") as producer:
        assert producer.epoch == importer["epoch"] + 1
        next_id = client.bounds("events")["next_id"]
        done = producer.produce("events", [b"next"], ["key-0"]).result()
        assert (done.first_id, done.duplicate) == (next_id, False)
    counter = importer["counter"] + 1
    newer = {"topic": "events", "epoch": producer.epoch, "counter": counter}
    assert_repeat_is_known(continued, newer | {"first_id": next_id, "last_id": next_id}, "importer")
    with continued.flight() as port:
        old = stamped(importer, counter + 1, "importer")
        answer = port.produce("events", [b"old epoch"], [None], old)
    assert answer["error"]["code"] == "fenced"


def test_producer_with_gaps_goes_on(continued, client, expected):
    producer = expected["producers"]["with-gaps"]
    assert_repeat_is_known(continued, producer, producer["name"])
    settings = {"dense": False, "kept_results": 4}
    opened = client.act("producer.open", producer=producer["name"], **settings)
    assert opened["last_counter"] == producer["counter"]
    assert opened["epoch"] == producer["epoch"] + 1
    with continued.flight() as port:
        stamp = {"producer": producer["name"], "epoch": opened["epoch"], "counter": 100}
        assert port.produce("events", [b"gap"], [None], stamp)["duplicate"] is False
        stale = stamp | {"counter": 5}
        assert "error" in port.produce("events", [b"old"], [None], stale)


def test_anonymous_producer_goes_on(unopened, expected):
    producer = expected["producers"]["anonymous"]
    assert_repeat_is_known(unopened, producer, producer["name"])
    with unopened.flight() as port, unopened.client() as client:
        following = stamped(producer, producer["counter"] + 1, producer["name"])
        assert port.produce("events", [b"next"], [None], following)["duplicate"] is False
        gap = stamped(producer, producer["counter"] + 3, producer["name"])
        answer = port.produce("events", [b"gap"], [None], gap)
        assert answer["error"]["code"] == "out_of_sequence"
        client.act("producer.close", producer=producer["name"], epoch=producer["epoch"])
        answer = port.produce("events", [b"closed"], [None], following)
        assert answer["error"]["code"] == "unknown_producer"


def test_stage_can_be_published(client, expected):
    stage = expected["stage"]
    with client.stage() as unused:
        unused.put("invoices", [b"a repeat of the first publish"])
        assert client.publish([unused], stage["published"])["duplicate"] is True
    before = {topic: len(goldenread.rows(client, topic)) for topic in stage["topics"]}
    stamp = stage["published"] | {"counter": stage["published"]["counter"] + 1}
    assert client.publish([stage["stage"]], stamp)["duplicate"] is False
    for topic in stage["topics"]:
        found = goldenread.rows(client, topic)[before[topic] :]
        assert sorted(row["body"].decode() for row in found) == stage["bodies"]


def test_dropped_topic_made_again_gives_no_id_twice(client, expected):
    dropped = expected["dropped_topic"]
    client.create_topic(dropped["topic"], shards=1)
    with client.producer() as producer:
        done = producer.produce(dropped["topic"], [b"new"]).result()
    assert done.first_id == dropped["next_id"]
    assert client.bounds(dropped["topic"])["shards"][0]["start"] == dropped["next_offset"]


# --- pirate clients continue


def message_state(message: Any) -> tuple[int, int, str]:
    return message.id, message.timestamp_ns, goldenread.digest(message.body)


def expected_message(expected: dict[str, Any], topic: str, number: int) -> tuple[int, int, str]:
    (row,) = (row for row in expected["topics"][topic]["messages"] if row[0] == number)
    return row[0], row[3], row[6]


@pytest.mark.parametrize("name", ["sender", "reader"])
def test_pirate_client_goes_on(golden, continued, expected, tmp_path, name):
    """It reads the next message, and the bus executes its unanswered request once."""
    state = expected["pirate"][name]
    folder = copied(golden / "pirate-client" / name, tmp_path / "state")
    notices: list[str] = []
    with (
        continued.client() as client,
        pirate.blocking.connect(
            continued.addresses["pirate"], state=folder, on_notice=notices.append
        ) as subscriber,
    ):
        assert subscriber.id == state["id"].encode()
        assert subscriber.counter == state["counter"]
        assert subscriber.subscriptions == {"news": state["read"]}
        assert list(subscriber.pending or ())[:3] == state["pending"]
        message = subscriber.get("news")
        assert message_state(message) == expected_message(expected, "news", state["next_id"])

        end = client.bounds("news")["next_id"]
        was_stored = "stored_as" in state
        outcome = subscriber.resume()
        assert outcome is not None
        assert outcome.value == (state["stored_as"] if was_stored else end)
        assert client.bounds("news")["next_id"] == (end if was_stored else end + 1)
        assert subscriber.pending is None
        assert subscriber.put("news", b"after the golden data") == end + (not was_stored)
    # One about the request without an answer; none that doubts the bus.
    assert len(notices) == 1, notices


def test_bus_knows_how_far_a_pirate_subscriber_has_read(unopened, expected, tmp_path):
    """A client with a new state folder gets the message after LAST of the bus."""
    lasts = {row[0]: row[1] for row in expected["topics"]["news"]["subscribers"]}
    last = lasts[b"reader".hex()]
    server = unopened.addresses["pirate"]
    with pirate.blocking.connect(server, id="reader", state=tmp_path / "new") as reader:
        message = reader.get("news")
        assert message_state(message) == expected_message(expected, "news", last + 1)
        again = pirate.blocking.connect(server, id="reader", state=tmp_path / "newer")
        with again, pytest.raises(Fenced):
            reader.get("news")


# --- rules, configuration, names


@pytest.fixture(scope="module")
def configured(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenBus]:
    """A bus with the golden configuration and rules, and an empty store."""
    folder = tmp_path_factory.mktemp("configured")
    (folder / "config.toml").write_text((golden / "config.toml").read_text())
    (folder / "data").mkdir(mode=0o700)
    (folder / "data" / "acl.toml").write_text((golden / "acl.toml").read_text())
    with GoldenBus(None, "--config", str(folder / "config.toml")) as bus:
        yield bus
        assert bus.stop() == 0


def test_rules_decide_as_before(configured, expected):
    with configured.client() as client:
        for question in expected["acl"]:
            asked = (question["who"], question["verb"], question["topic"])
            assert goldenread.decision(client, *asked) == question
    for allowed, code in ((True, 0), (False, 4)):
        one = next(one for one in expected["acl"] if one["allowed"] is allowed)
        asked = (one["who"], one["verb"], one["topic"])
        answer = json.loads(configured.run("acl", "test", *asked, "--json", code=code))
        assert (answer["allowed"], answer["rule"]) == (one["allowed"], one["rule"])


def test_configuration_means_the_same(golden, expected):
    file = str(golden / "config.toml")
    checked = command("config", "check", file, env=plain_environment())
    assert checked.returncode == 0, checked.stderr
    shown = json.loads(command("config", "show", file, "--json", env=plain_environment()).stdout)
    values = {key: shown[key]["value"] for key in expected["config"]["values"] if key in shown}
    assert values == expected["config"]["values"]


def test_configuration_is_in_force(configured, expected):
    with configured.client() as client:
        made = client.create_topic("default.shards")
    assert made["shards"] == expected["config"]["values"]["native.default_shards"]
    assert json.loads(configured.log().splitlines()[0])["event"]


def test_config_keys_are_still_known(expected):
    """Keys may be added. One that is gone or renamed breaks the files of users."""
    shown = json.loads(command("config", "show", "--json", env=plain_environment()).stdout)
    assert set(expected["config"]["keys"]) - set(shown) == set()


def test_error_codes_are_still_known(expected):
    assert set(expected["error_codes"]) - set(goldenread.error_codes()) == set()


def test_counter_names_are_still_known(unchanged, expected):
    goldenread.provoke_counters(unchanged)
    missing: set[str] = set(expected["counters"])

    def are_known() -> bool:
        nonlocal missing
        names = goldenread.counter_names(unchanged)
        parts = [name.split(".") for name in names]
        known = {".".join(one[:n]) for one in parts for n in range(1, len(one) + 1)}
        missing = set(expected["counters"]) - known
        return not missing

    try:
        wait_until(are_known, "counters", timeout_s=10.0)
    except AssertionError:
        assert missing == set()
        raise
