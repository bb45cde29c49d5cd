"""Checks of records: small values by key, changed atomically with the rest of a commit."""

from __future__ import annotations

from polybus.errors import Conflict, UsageError
from polybus.model.commit import MAX_KEY_BYTES, MAX_RECORD_BYTES, MAX_RECORD_CHANGES, RecordChange
from polybus.store.contract import Store
from polybus.testing.conformance.kit import Engine, append, put, refused


def _keys(store: Store, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[bytes]:
    return [record.key for record in store.scan(prefix, after, limit)]


def check_record_is_stored_and_read(engine: Engine) -> None:
    with engine.fresh() as store:
        assert store.get(b"k") is None
        done = put(store, changes=[RecordChange(b"k", b"v"), RecordChange(b"\0\xff", b"")])
        assert store.get(b"k") == (b"k", b"v", done.versions[0])
        assert store.get(b"\0\xff") == (b"\0\xff", b"", done.versions[1])
        assert 0 not in done.versions


def check_each_change_has_a_new_version(engine: Engine) -> None:
    with engine.fresh() as store:
        versions = [put(store, changes=[RecordChange(b"k", b"same")]).versions[0] for _ in range(3)]
        assert len(set(versions)) == 3


def check_recreated_record_has_a_new_version(engine: Engine) -> None:
    with engine.fresh() as store:
        versions = set()
        for value in (b"a", b"b", None, b"c", None, b"d"):
            versions.add(put(store, changes=[RecordChange(b"k", value)]).versions[0])
        assert len(versions - {0}) == 4


def check_expected_versions_are_enforced(engine: Engine) -> None:
    with engine.fresh() as store:
        first = put(store, changes=[RecordChange(b"k", b"1", 0)]).versions[0]
        for wrong in (0, first + 1000):
            with refused(Conflict, store):
                put(store, changes=[RecordChange(b"k", b"x", wrong)])
            with refused(Conflict, store):
                put(store, changes=[RecordChange(b"k", None, wrong)])
        second = put(store, changes=[RecordChange(b"k", b"2", first)]).versions[0]
        with refused(Conflict, store):
            put(store, changes=[RecordChange(b"k", b"x", first)])
        put(store, changes=[RecordChange(b"k", b"3", None)])
        with refused(Conflict, store):
            put(store, changes=[RecordChange(b"k", b"x", second)])


def check_missing_record_has_version_0(engine: Engine) -> None:
    with engine.fresh() as store:
        with refused(Conflict, store):
            put(store, changes=[RecordChange(b"k", b"x", 1)])
        version = put(store, changes=[RecordChange(b"k", b"v", 0)]).versions[0]
        assert put(store, changes=[RecordChange(b"k", None, version)]).versions == (0,)
        assert store.get(b"k") is None
        with refused(Conflict, store):
            put(store, changes=[RecordChange(b"k", b"x", version)])
        put(store, changes=[RecordChange(b"k", b"w", 0)])


def check_removing_a_missing_record(engine: Engine) -> None:
    with engine.fresh() as store:
        done = put(store, changes=[RecordChange(b"k", None), RecordChange(b"l", None, 0)])
        assert done.versions == (0, 0)
        with refused(Conflict, store):
            put(store, changes=[RecordChange(b"k", None, 7)])
        assert store.scan(b"") == []


def check_changes_are_all_or_nothing(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        put(store, changes=[RecordChange(b"a", b"1"), RecordChange(b"b", b"1")])
        with refused(Conflict, store):
            put(
                store,
                append(topic, 0, b"x"),
                changes=[
                    RecordChange(b"a", b"2"),
                    RecordChange(b"c", b"2"),
                    RecordChange(b"b", None, 999),
                ],
            )


def check_versions_come_in_the_order_of_the_changes(engine: Engine) -> None:
    with engine.fresh() as store:
        put(store, changes=[RecordChange(b"gone", b"x")])
        changes = [RecordChange(b"z", b"1"), RecordChange(b"gone", None), RecordChange(b"a", b"2")]
        versions = put(store, changes=changes).versions
        found = [store.get(change.key) for change in changes]
        assert versions == tuple(record.version if record else 0 for record in found)


def check_a_commit_changes_a_record_once(engine: Engine) -> None:
    with engine.fresh() as store:
        for second in (b"w", None):
            with refused(UsageError, store):
                put(store, changes=[RecordChange(b"k", b"v"), RecordChange(b"k", second)])


def check_only_one_of_two_equal_expectations_succeeds(engine: Engine) -> None:
    with engine.fresh() as store:
        version = put(store, changes=[RecordChange(b"k", b"0")]).versions[0]
        wins = 0
        for value in (b"1", b"2", b"3"):
            try:
                put(store, changes=[RecordChange(b"k", value, version)])
                wins += 1
            except Conflict:
                pass
        record = store.get(b"k")
        assert record is not None
        assert (wins, record.value) == (1, b"1")


def check_scan_returns_keys_in_order(engine: Engine) -> None:
    with engine.fresh() as store:
        keys = [b"b", b"a\xff", b"a", b"ab", b"a\0", b"\xff\xff", b"\xff", b"aa"]
        put(store, changes=[RecordChange(key, b"v" + key) for key in keys])
        assert _keys(store, b"") == sorted(keys)
        assert _keys(store, b"a") == [b"a", b"a\0", b"aa", b"ab", b"a\xff"]
        assert _keys(store, b"\xff") == [b"\xff", b"\xff\xff"]
        assert _keys(store, b"c") == []
        assert [record.value for record in store.scan(b"b")] == [b"vb"]


def check_scan_continues_after_a_key(engine: Engine) -> None:
    with engine.fresh() as store:
        put(store, changes=[RecordChange(b"p%d" % number, b"") for number in range(5)])
        put(store, changes=[RecordChange(b"o", b""), RecordChange(b"q", b"")])
        assert _keys(store, b"p", b"p1") == [b"p2", b"p3", b"p4"]
        assert _keys(store, b"p", b"p1x") == [b"p2", b"p3", b"p4"]
        assert _keys(store, b"p", b"a", limit=2) == [b"p0", b"p1"]
        assert _keys(store, b"p", b"p4") == []
        assert _keys(store, b"p", b"z") == []
        assert _keys(store, b"", b"p3", limit=10) == [b"p4", b"q"]


def check_records_have_limits(engine: Engine) -> None:
    with engine.fresh() as store:
        key, value = b"k" * MAX_KEY_BYTES, b"v" * MAX_RECORD_BYTES
        put(store, changes=[RecordChange(key, value)])
        record = store.get(key)
        assert record is not None
        assert record.value == value
        assert _keys(store, key[:-1]) == [key]
        bad = (
            RecordChange(b"", b""),
            RecordChange(key + b"k", b""),
            RecordChange(b"v", value + b"v"),
        )
        text = RecordChange(b"k", "text")  # type: ignore[arg-type]
        for change in (*bad, RecordChange(b"k", b"", -1), text):
            with refused(UsageError, store):
                put(store, changes=[change])
        with refused(UsageError, store):
            put(
                store, changes=[RecordChange(b"%d" % n, b"") for n in range(MAX_RECORD_CHANGES + 1)]
            )


def check_reads_of_records_have_limits(engine: Engine) -> None:
    with engine.fresh() as store:
        long = b"k" * (MAX_KEY_BYTES + 1)
        for key in (b"", long):
            with refused(UsageError):
                store.get(key)
        for prefix, after, limit in ((long, b"", 1), (b"", long, 1), (b"", b"", 0), (b"", b"", -1)):
            with refused(UsageError):
                store.scan(prefix, after, limit)
