"""The file log: groups, limits, ownership, faults of the disk, and what recovery refuses."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.errors import (
    Damaged,
    DataFolderInUse,
    LimitReached,
    PolybusError,
    StoreFault,
    UsageError,
    WrongFormat,
)
from polybus.store.log import codec, limits
from polybus.store.log.file_log import FileLog
from polybus.store.log.segment import Segment
from polybus.store.log.write_ahead_log import LogRecord
from polybus.testing.conformance.log_kit import Appender, payloads, refusal
from tests.rig.oracle import log as oracle
from tests.vectors import log as vectors

SEGMENT_BYTES = 64 << 10
FLIPS = 120


def open_log(folder: Path, **options: object) -> FileLog:
    settings = {"segment_bytes": SEGMENT_BYTES, "segment_count": 4, **options}
    return FileLog(folder, **settings)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "log"


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def fill(folder: Path, count: int = 150) -> list[bytes]:
    """Write records over several segments, one group each, and close the log."""
    written = [b"%d " % number * 300 for number in range(count)]
    with open_log(folder) as log:
        appender = Appender(log)
        for payload in written:
            appender.put(payload)
    return written


def read_again(folder: Path) -> list[bytes]:
    with open_log(folder) as log:
        return payloads(log)


def read_or_error(folder: Path) -> list[bytes] | StoreFault:
    try:
        return read_again(folder)
    except (Damaged, WrongFormat) as error:
        return error


# --- groups


class Calls:
    """Counts the writes and syncs of a log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = self.syncs = 0
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.is_syncing = threading.Event()
        real_write, real_sync = Segment.write, Segment.sync

        def write(segment: Segment, *arguments: object) -> None:
            self.writes += 1
            real_write(segment, *arguments)  # type: ignore[arg-type]

        def sync(segment: Segment) -> None:
            self.syncs += 1
            self.is_syncing.set()
            assert self.may_sync.wait(30)
            real_sync(segment)

        monkeypatch.setattr(Segment, "write", write)
        monkeypatch.setattr(Segment, "sync", sync)


def test_appends_in_flight_share_a_write_and_a_sync(folder, monkeypatch):
    with open_log(folder) as log:
        calls, appender = Calls(monkeypatch), Appender(log)
        calls.may_sync.clear()
        first = log.append(appender.record(b"first"))
        assert calls.is_syncing.wait(30)
        futures = []
        for _ in range(100):
            appender.number += 1
            futures.append(log.append(appender.record(b"x")))
        calls.may_sync.set()
        for future in (first, *futures):
            future.result(30)
        assert (calls.writes, calls.syncs) == (2, 2)


def test_caller_that_waits_writes_itself(folder, monkeypatch):
    with open_log(folder) as log:
        appender, threads = Appender(log), set()
        real_sync = Segment.sync

        def sync(segment: Segment) -> None:
            threads.add(threading.current_thread())
            real_sync(segment)

        monkeypatch.setattr(Segment, "sync", sync)
        for _ in range(20):
            log.append(appender.record(b"x")).result()
            appender.number += 1
        assert threading.current_thread() in threads


def test_interval_resolves_before_the_sync(folder, monkeypatch):
    with open_log(folder, durability="interval", commit_interval_ms=1) as log:
        calls = Calls(monkeypatch)
        calls.may_sync.clear()
        Appender(log).put(b"x")
        assert (log.end, log.synced_end) == (2, 1)
        calls.may_sync.set()


def test_pending_appends_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PENDING", 3)
    monkeypatch.setattr(limits, "MAX_PENDING_BYTES", 100)
    with open_log(folder) as log:
        calls, appender = Calls(monkeypatch), Appender(log)
        calls.may_sync.clear()
        futures = [log.append(appender.record(b"x"))]
        assert calls.is_syncing.wait(30)
        appender.number += 1
        futures.append(log.append(appender.record(bytes(60))))
        appender.number += 1
        assert isinstance(refusal(log, appender.record(bytes(60))), LimitReached)
        for _ in range(2):
            futures.append(log.append(appender.record(b"")))
            appender.number += 1
        assert isinstance(refusal(log, appender.record(b"")), LimitReached)
        calls.may_sync.set()
        for future in futures:
            future.result(30)
        appender.put(b"next")


# --- the folder


def test_second_owner_is_refused(folder):
    with open_log(folder), pytest.raises(DataFolderInUse):
        open_log(folder)
    open_log(folder).close()


def test_files_belong_to_the_owner_alone(folder):
    fill(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(segment_files(folder)) > 1
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_log_keeps_its_segment_size_and_takes_a_lower_count(folder):
    written = fill(folder)
    with open_log(folder, segment_bytes=1 << 20, segment_count=2) as log:
        assert payloads(log) == written
        log.trim(log.end)
        appender = Appender(log)
        while len(segment_files(folder)) > 2:
            appender.number += refuse_or_append(log, appender)
            log.trim(log.end)
        assert {path.stat().st_size for path in segment_files(folder)} == {SEGMENT_BYTES}


def refuse_or_append(log: FileLog, appender: Appender) -> bool:
    return log.append(appender.record(bytes(1000))).exception(30) is None


@pytest.mark.parametrize(
    "options", [{"segment_bytes": 1000}, {"segment_bytes": SEGMENT_BYTES + 1}, {"segment_count": 1}]
)
def test_wrong_options_are_refused(folder, options):
    with pytest.raises(UsageError):
        open_log(folder, **options)


# --- faults of the disk


@pytest.fixture
def null() -> Iterator[int]:
    """Return a descriptor that takes writes and cannot be synced."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.mark.sabotage("log-failed-sync-ignored", expects="DID NOT RAISE")
def test_failed_sync_is_final_until_the_log_is_opened_again(folder, null):
    with open_log(folder) as log:
        appender = Appender(log)
        appender.put(b"a", b"b")
        os.dup2(null, log._pool.used[-1].segment._descriptor)
        futures = []
        for _ in range(3):
            futures.append(log.append(appender.record(b"lost")))
            appender.number += 1
        for future in futures:
            with pytest.raises(StoreFault, match="open it again"):
                future.result()
        assert type(refusal(log, LogRecord(appender.epoch, 7, 3, ()))) is StoreFault
        assert log.end == 3
    with open_log(folder) as log:
        assert payloads(log) == [b"a", b"b"]
        Appender(log).put(b"c")


def test_failed_sync_at_an_interval_is_final(folder, null):
    with open_log(folder, durability="interval", commit_interval_ms=1) as log:
        appender = Appender(log)
        os.dup2(null, log._pool.used[-1].segment._descriptor)
        while log.append(appender.record(b"x")).exception(30) is None:
            appender.number += 1
        assert type(refusal(log, appender.record(b"x"))) is StoreFault
        assert log.synced_end == 1


def test_failed_write_is_final(folder):
    with open_log(folder) as log:
        appender = Appender(log)
        appender.put(b"a")
        descriptor = log._pool.used[-1].segment._descriptor
        readable = os.open(segment_files(folder)[0], os.O_RDONLY)
        os.dup2(readable, descriptor)
        os.close(readable)
        with pytest.raises(StoreFault):
            appender.put(b"b")
        assert payloads(log) == [b"a"]
    assert read_again(folder) == [b"a"]


# --- recovery


def reads_in_recovery(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes that opening the log reads."""
    total = 0
    real = Segment.read

    def read(segment: Segment, offset: int, size: int) -> bytes:
        nonlocal total
        data = real(segment, offset, size)
        total += len(data)
        return data

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "read", read)
        patch.setattr("polybus.store.log.segment.WINDOW_BYTES", 4096)
        open_log(folder).close()
    return total


def test_closed_log_opens_without_reading_all_records(folder, monkeypatch):
    fill(folder)
    assert len(segment_files(folder)) == 4
    assert reads_in_recovery(folder, monkeypatch) < 2 * SEGMENT_BYTES


def test_log_without_a_close_is_recovered(folder, tmp_path):
    with open_log(folder) as log:
        appender = Appender(log)
        for number in range(60):
            appender.put(b"%d" % number)
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            if number % 20 == 0:
                shutil.copytree(folder, tmp_path / "copy")
                assert len(read_again(tmp_path / "copy")) == number + 1


def test_leftovers_of_a_torn_group_never_follow_new_records(folder, tmp_path):
    """The first record of an unsynced group is lost, and its second one stays."""
    fill(folder, 3)
    with open_log(folder) as log:
        epoch = Appender(log).epoch
        end = log._offset
        log_id = log._log_id
    with segment_files(folder)[0].open("r+b") as file:
        second = oracle.encode_record(log_id, LogRecord(epoch, 7, 5, (b"left",)), synced=3)
        file.seek(end)
        file.write(bytes(64) + second)
    with open_log(folder) as log:
        assert log.end == 4
        assert log.tail.epoch == epoch
        assert type(refusal(log, LogRecord(epoch, 7, 4, (b"new",)))) is UsageError
        Appender(log).put(b"12345678")  # 64 bytes: the leftover is right behind it
    assert read_again(folder)[3:] == [b"12345678"]


@pytest.mark.sabotage("log-mark-kept", expects="leftovers were not read")
def test_mark_of_a_former_close_is_not_the_end(folder, tmp_path):
    """The next owner is killed in its first group, which is in another segment than the mark."""
    fill(folder, 50)
    with open_log(folder) as log:
        while len(segment_files(folder)) < 2:
            Appender(log).put(bytes(100))
    with open_log(folder) as log:
        tail, log_id = log.tail, log._log_id
        shutil.copytree(folder, tmp_path / "copy")
    left = LogRecord(tail.epoch + 1, 7, tail.number + 2, (b"left",))
    with segment_files(tmp_path / "copy")[1].open("r+b") as file:
        file.seek(4096 + 640)
        file.write(oracle.encode_record(log_id, left, synced=tail.number))
    with open_log(tmp_path / "copy") as log:
        assert log.tail == (left.epoch, tail.number), "leftovers were not read"


@pytest.mark.sabotage("log-checksum-off", expects="differ")
def test_flipped_bits_of_a_closed_log_are_damage(folder, tmp_path):
    written = fill(folder)
    choices = random.Random()
    found = 0
    for _ in range(FLIPS):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        path = choices.choice(segment_files(copy))
        data = bytearray(path.read_bytes())
        place = choices.randrange(len(data))
        data[place] ^= 1 << choices.randrange(8)
        path.write_bytes(data)
        outcome = read_or_error(copy)
        if isinstance(outcome, StoreFault):
            assert path.name in str(outcome)
            found += 1
        else:
            # Zeros behind the records, padding, and the rest of the header are not read.
            assert outcome == written, f"records differ after a flip in {path.name} at {place}"
        shutil.rmtree(copy)
    assert found > FLIPS // 4


@pytest.mark.sabotage("log-damage-ignored", expects="DID NOT RAISE")
def test_damage_before_a_synced_record_is_an_error_without_a_close(folder, tmp_path):
    with open_log(folder) as log:
        appender = Appender(log)
        for number in range(5):
            appender.put(b"number %d" % number)
        shutil.copytree(folder, tmp_path / "copy")
    (path,) = segment_files(tmp_path / "copy")
    data = path.read_bytes()
    at = data.index(b"number 2") - codec.HEAD_BYTES
    path.write_bytes(data.replace(b"number 2", b"number X"))
    with pytest.raises(Damaged, match=rf"{path.name} at offset {at}.*record 3 is damaged"):
        open_log(tmp_path / "copy")
    # The last record looks like one that was never acknowledged.
    path.write_bytes(data.replace(b"number 4", b"number X"))
    assert len(read_again(tmp_path / "copy")) == 4


def test_damaged_first_record_of_a_segment_is_an_error(folder):
    fill(folder)
    path = segment_files(folder)[1]
    data = bytearray(path.read_bytes())
    data[4096 + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=path.name):
        read_again(folder)


def test_cut_segment_is_refused(folder):
    fill(folder)
    path = segment_files(folder)[1]
    for size in (SEGMENT_BYTES - 1, 4096, 10, 0):
        os.truncate(path, size)
        with pytest.raises((Damaged, WrongFormat), match=path.name):
            open_log(folder)


def test_missing_segment_is_refused(folder):
    fill(folder)
    segment_files(folder)[1].unlink()
    with pytest.raises(Damaged, match=r"segment 0+2 is missing"):
        open_log(folder)


def test_segment_of_another_log_is_refused(folder, tmp_path):
    fill(folder)
    fill(tmp_path / "other")
    shutil.copy(segment_files(tmp_path / "other")[1], segment_files(folder)[1])
    with pytest.raises(Damaged, match="belongs to another log"):
        open_log(folder)


def test_record_of_another_version_stops_recovery(folder):
    fill(folder, 3)
    with open_log(folder) as log:
        end, log_id = log._offset, log._log_id
    path = segment_files(folder)[0]
    with path.open("r+b") as file:
        newer = oracle.encode_record(log_id, LogRecord(9, 7, 4, (b"new",)), synced=3, version=2)
        file.seek(end)
        file.write(newer)
    with pytest.raises(WrongFormat, match=f"{path.name} at offset {end}: record 4 has version 2"):
        open_log(folder)


def test_failed_open_releases_the_folder(folder):
    fill(folder)
    path = segment_files(folder)[0]
    data = path.read_bytes()
    path.write_bytes(b"x" * SEGMENT_BYTES)
    with pytest.raises(PolybusError):
        open_log(folder)
    path.write_bytes(data)
    open_log(folder).close()


# --- golden vectors


def test_vectors_are_written_and_read():
    for vector in vectors.records():
        record = LogRecord(vector.epoch, vector.writer, vector.number, (vector.payload,))
        length = len(vector.payload)
        parts = codec.encode_record(vector.log_id, record, length, vector.synced)
        if vector.kind == codec.CLOSED:
            parts = [codec.encode_mark(vector.log_id, vector.number, vector.epoch)]
        encoded = b"".join(parts)
        assert encoded == vector.data, vector.name
        head = codec.decode_head(encoded, 0, vector.log_id)
        assert head is not None
        assert head.size == len(vector.data)
        assert codec.is_intact(encoded, 0, head)
        assert codec.decode_head(encoded, 0, vector.log_id ^ 1) is None
    header = vectors.segment()
    assert codec.encode_segment_header(header.segment_bytes, header.log_id)[:40] == header.data
    assert codec.decode_segment_header(header.data.ljust(4096, b"\0")) == (
        header.segment_bytes,
        header.log_id,
    )


def test_vectors_are_those_of_the_oracle():
    for vector in vectors.records():
        record = LogRecord(vector.epoch, vector.writer, vector.number, (vector.payload,))
        encoded = oracle.encode_record(vector.log_id, record, vector.synced, kind=vector.kind)
        assert encoded == vector.data, vector.name
