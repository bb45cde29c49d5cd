"""`polybus pipeline retain`: trims archived, acked and read messages, and no others."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from polybus import pirate
from polybus.errors import Conflict, Damaged, UsageError, WrongFormat
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import Manifest, OffsetSpan, commit_manifest, read_manifest
from polybus.spark.pipelines import archive, retain
from polybus.spark.pipelines.requeue import find_needed_markers
from polybus.spark.pipelines.retain import find_trimmable
from polybus.spark.source.log_access import ShardOffsets, first_with_id, open_log_access
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

PATIENCE_S = 60.0
ROWS = 60


def fill(client, topic, numbers):
    with client.producer() as producer:
        keys = [f"k{n % 7}" for n in numbers]
        producer.produce(topic, [b"%d" % n for n in numbers], keys).result(PATIENCE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("retain") / "archive"


@pytest.fixture(scope="module")
def topics(spark, shared_bus, folder):
    """Topics with all but the last ten messages archived, one per test."""
    names = [f"t.retain.{n}" for n in range(7)]
    with shared_bus.client() as client:
        for name in names:
            client.create_topic(name, shards=2)
            fill(client, name, range(ROWS))
        archive(spark, "t.retain.*", str(folder), bus=shared_bus.url, once=True)
        for name in names:
            fill(client, name, range(ROWS, ROWS + 10))
    return names


@pytest.fixture
def made(topics):
    return topics.pop()


@pytest.fixture
def once(spark, bus, folder):
    return lambda topic: retain(spark, str(folder), topic, bus=bus.url, once=True)


def starts(bus, topic):
    return {n: shard.start for n, shard in open_log_access(bus.url).shards(topic).items()}


def archived(folder, topic):
    return {n: span.end for n, span in read_manifest(ArchiveFolder(folder), topic).shards.items()}


def test_archived_messages_are_trimmed(bus, made, once, folder):
    summary = once(made)
    assert (summary.rows, summary.facts) == (ROWS, {"topics": 1, "held back by": ["none"]})
    assert starts(bus, made) == archived(folder, made)
    assert once(made).rows == 0


def test_group_without_acks_holds_the_log(bus, client, made, once, folder):
    client.act("group.join", topic=made, group="slow", consumer="one")
    summary = once(made)
    assert (summary.rows, summary.facts["held back by"]) == (0, ["group slow"])
    assert starts(bus, made) == {0: 0, 1: 0}
    to = {"offsets": {"0": 3, "1": 5}}
    client.act("group.reset", topic=made, group="slow", to=to, force=True)
    assert once(made).rows == 8
    assert starts(bus, made) == {0: 3, 1: 5}
    client.act("group.rm", topic=made, group="slow", force=True)
    assert once(made).rows == ROWS - 8


def test_limits_of_the_topic_keep_the_newest_messages(bus, client, made, once, folder):
    client.configure_topic(made, {"retain_messages": 30})
    summary = once(made)
    assert summary.facts["held back by"] == ["retention of the topic"]
    # The bus may have trimmed before the pipeline did. Neither removes more than the limit.
    assert client.topic(made)["retention"]["stored_messages"] >= 30
    client.configure_topic(made, {"retain_messages": None})
    once(made)
    assert starts(bus, made) == archived(folder, made)


def test_pirate_subscriber_holds_the_log(spark, topic, tmp_path):
    with (
        NativeBus(listen=["pirate=tcp://127.0.0.1:0"]) as bus,
        bus.client() as client,
        pirate.blocking.connect(
            str(bus.process.address("pirate")), state=str(tmp_path / "state")
        ) as subscriber,
    ):
        client.create_topic(topic, shards=2)
        subscriber.subscribe(topic)
        fill(client, topic, range(ROWS))
        read = [message.id for _ in range(4) if (message := subscriber.get(topic)) is not None]

        def last_read() -> int:
            return int(client.topic_stats(topic)["subscribers"][0]["last"])

        # A GET is answered before the acknowledgement that it carries is stored.
        until(lambda: last_read() >= read[-2], "the last acknowledgement is stored")
        archive(spark, topic, str(tmp_path / "a"), bus=bus.url, once=True)
        summary = retain(spark, str(tmp_path / "a"), topic, bus=bus.url, once=True)
        last = last_read()
        assert last in read[-2:]  # the next GET acknowledges the last message
        assert summary.rows == last
        assert client.bounds(topic)["first_id"] == last + 1
        assert str(summary.facts["held back by"]).startswith("['subscriber ")
        while subscriber.get(topic) is not None:
            pass
        until(lambda: last_read() == ROWS, "the last acknowledgement is stored")
        summary = retain(spark, str(tmp_path / "a"), topic, bus=bus.url, once=True)
        assert summary.rows == ROWS - last


def test_only_named_topics_are_trimmed(bus, made, once):
    assert once("another").rows == 0
    assert once(made).rows == ROWS


def test_missing_or_damaged_file_keeps_the_log(bus, made, once, folder):
    (file,) = read_manifest(ArchiveFolder(folder), made).files
    path = folder / file.path
    path.rename(path.with_suffix(".gone"))
    with pytest.raises(Damaged, match=r"nothing was trimmed .* is missing"):
        once(made)
    assert starts(bus, made) == {0: 0, 1: 0}
    path.with_suffix(".gone").rename(path)
    assert once(made).rows == ROWS


def test_manifest_with_rows_that_files_lack_keeps_the_log(bus, made, once, folder):
    manifest = read_manifest(ArchiveFolder(folder), made)
    (file,) = manifest.files
    spans = {n: OffsetSpan(span.start, span.end + 1) for n, span in manifest.shards.items()}
    # The last rows must be valid: they are compared with the log first.
    lasts = {}
    for shard, span in spans.items():
        (batch,) = open_log_access(bus.url).read(made, shard, span.end - 1, span.end)
        lasts[shard] = (batch.column("id")[0].as_py(), batch.column("timestamp_ns")[0].as_py())
    commit_manifest(
        ArchiveFolder(folder),
        Manifest.parse(
            {
                **manifest.as_json(),
                "number": manifest.number + 1,
                "files": [
                    {**file.as_json(), "shards": {str(n): list(s) for n, s in spans.items()}}
                ],
                "shards": {
                    str(n): {**s._asdict(), "id": lasts[n][0], "timestamp_ns": lasts[n][1]}
                    for n, s in spans.items()
                },
            }
        ),
    )
    with pytest.raises(Damaged, match="its archive must have"):
        once(made)
    assert starts(bus, made) == {0: 0, 1: 0}


def test_log_that_is_not_archived_is_not_trimmed(bus, made, once, folder):
    manifest = read_manifest(ArchiveFolder(folder), made).as_json()
    for shard in manifest["shards"].values():
        shard["id"] += 1
    commit_manifest(ArchiveFolder(folder), Manifest.parse({**manifest, "number": 2}))
    with pytest.raises(Conflict, match="is not the archived topic"):
        once(made)
    assert starts(bus, made) == {0: 0, 1: 0}


def test_archive_and_running_bus_are_required(spark, bus, tmp_path):
    with pytest.raises(WrongFormat, match="is not an archive"):
        retain(spark, str(tmp_path / "none"), bus=bus.url, once=True)
    ArchiveFolder(tmp_path).prepare()
    with pytest.raises(UsageError, match="only a running bus"):
        retain(spark, str(tmp_path), bus=f"lmdb:{bus.folder}", once=True)


# --- holds


class Log:
    """Access with ids 10, 12, 14… at offsets 0, 1, 2…"""

    def read(self, topic, shard, start, end):
        yield pa.RecordBatch.from_pydict({"id": [10 + 2 * n for n in range(start, end)]})


@pytest.mark.parametrize(
    ("last", "offset"), [(0, 3), (15, 3), (16, 4), (17, 4), (28, 10), (99, 10)]
)
def test_first_unread_offset_of_a_subscriber(last, offset):
    log: Any = Log()
    assert first_with_id(log, "t", 0, ShardOffsets(3, 10), last + 1) == offset


def test_marker_is_kept_as_long_as_its_letter(bus, client, topic):
    letters, marked, access = f"{topic}.dlq", f"{topic}.dlq.requeued", open_log_access(bus.url)
    client.create_topic(letters, shards=1)
    client.create_topic(marked, shards=1)
    fill(client, letters, range(10))
    bodies = [json.dumps({"shard": 0, "offset": n}).encode() for n in (4, 0, 7, 5)]
    with client.producer() as producer:
        producer.produce(marked, bodies).result(PATIENCE_S)

    def first():
        return find_needed_markers(access, marked, access.shards(marked))

    needed = []
    for start in (0, 5, 8):
        client.trim(letters, {0: start})
        needed.append(first())
    client.drop_topic(letters)
    assert (needed, first()) == ([{0: 0}, {0: 2}, {0: 4}], {})
    assert find_needed_markers(access, letters, {0: ShardOffsets(0, 1)}) == {}


@pytest.mark.parametrize(
    ("groups", "subscribers", "end", "by"),
    [
        ([], [], 8, "the archive"),
        ([("g", 5)], [], 5, "group g"),
        ([("g", 9)], [("s", 20)], 6, "subscriber s"),
        ([("g", 4)], [("s", 20)], 4, "group g"),
        ([("g", 1)], [], 3, "group g"),
    ],
)
def test_lowest_hold_decides(groups, subscribers, end, by):
    stats = {
        "groups": [{"group": g, "shards": [{"shard": 0, "low": low}]} for g, low in groups],
        "subscribers": [{"id": name, "last": last} for name, last in subscribers],
    }
    manifest = Manifest("t", shards={0: OffsetSpan(0, 8)})
    log: Any = Log()
    trimmable = find_trimmable(log, manifest, {0: ShardOffsets(3, 10)}, stats, {}, {})
    assert trimmable == {0: (OffsetSpan(3, end), by)}


@pytest.mark.parametrize(
    ("retention", "end", "by"),
    [
        ({"age_ms": None, "bytes": None, "messages": None, "due_before": {}}, 8, "the archive"),
        ({"messages": 100, "due_before": {}}, 3, "retention of the topic"),
        ({"age_ms": 1000, "due_before": {"0": 5}}, 5, "retention of the topic"),
        ({"bytes": 1, "due_before": {"0": 9}}, 8, "the archive"),
    ],
)
def test_limits_of_the_topic_keep_archived_messages(retention, end, by):
    manifest = Manifest("t", shards={0: OffsetSpan(0, 8)})
    log: Any = Log()
    stats: dict[str, list[Any]] = {"groups": [], "subscribers": []}
    trimmable = find_trimmable(log, manifest, {0: ShardOffsets(3, 10)}, stats, {}, retention)
    assert trimmable == {0: (OffsetSpan(3, end), by)}
