"""A torn event is cut off; any other damage of a journal is reported."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.pirate.client import client_journal
from polybus.dialects.pirate.client.client_journal import (
    HEADER,
    MAGIC,
    NAME,
    NEW,
    Journal,
    encode_event,
)
from polybus.dialects.pirate.client.journal_state import (
    EpochOpened,
    Event,
    IdAssigned,
    JournalState,
    MessageRead,
    PositionsDoubted,
    PositionsTrusted,
    RequestAnswered,
    RequestForgotten,
    RequestRecorded,
)
from polybus.errors import Damaged, StoreFault, StoreFull, WrongFormat
from tests.unit.pirate.conftest import in_memory

LIFE: tuple[Event, ...] = (
    EpochOpened(1, 0),
    RequestRecorded(1, "SUB", "news", b""),
    RequestAnswered(1, 4, "", True),
    MessageRead("news", 5),
    RequestRecorded(2, "PUT", "news", b"hello" * 9),
    EpochOpened(2, 1),
    RequestAnswered(2, 6, "", True),
    RequestRecorded(3, "PUT", "other", b""),
    RequestAnswered(3, None, "NO_TOPIC", True),
    MessageRead("news", 6),
    RequestRecorded(4, "UNSUB", "news", b""),
    EpochOpened(3, 4),
    RequestForgotten(4),
    PositionsDoubted(),
    PositionsTrusted(),
)


@pytest.fixture
def tmp_path():
    with in_memory() as folder:
        yield folder


def lived(folder: Path, events: tuple[Event, ...] = LIFE) -> list[tuple[int, JournalState]]:
    """Write a journal of these events. Returns the end of each event and the state after it."""
    made = client_journal.create_journal(folder, b"me")
    steps = [(made._end, _copy(made.state))]
    for event in events:
        made.append(event)
        steps.append((made._end, _copy(made.state)))
    made.close()
    return steps


def _copy(state: JournalState) -> JournalState:
    copy = JournalState()
    copy.apply(state.snapshot())
    return copy


def reopened(folder: Path, data: bytes) -> JournalState:
    (folder / NAME).write_bytes(data)
    found = client_journal.open_journal(folder)
    assert found is not None
    found.close()
    return found.state


def test_journal_round_trips(tmp_path):
    steps = lived(tmp_path)
    found = client_journal.open_journal(tmp_path)
    assert found is not None
    assert found.state == steps[-1][1]
    found.close()


def test_journal_cut_at_any_byte_has_all_earlier_events(tmp_path):
    steps = lived(tmp_path)
    data = (tmp_path / NAME).read_bytes()
    for length in range(steps[0][0], len(data) + 1):
        known = [state for end, state in steps if end <= length][-1]
        assert reopened(tmp_path, data[:length]) == known, length
        # Opening truncates the torn event, so that the next one begins there.
        assert (tmp_path / NAME).stat().st_size == max(end for end, _ in steps if end <= length)


def test_journal_cut_at_any_byte_and_zero_filled_has_all_earlier_events(tmp_path):
    """A file may have grown before its bytes were on the disk."""
    steps = lived(tmp_path)
    data = (tmp_path / NAME).read_bytes()
    ends = [end for end, _ in steps]
    for (start, known), end in zip(steps, ends[1:], strict=False):
        for length in {start, *range(start + HEADER.size, end)}:
            torn = data[:length] + bytes(end - length)
            if torn != data[:end]:
                assert reopened(tmp_path, torn) == known, length


def test_event_torn_at_a_sector_inside_its_header_is_cut_off(tmp_path):
    made = client_journal.create_journal(tmp_path, b"me")
    room = client_journal.SECTOR_BYTES - made._end - HEADER.size - 5  # a head that lies across
    filler = next(
        event
        for event in (MessageRead("n" * size, 1) for size in range(1, room))
        if client_journal.SECTOR_BYTES - HEADER.size < made._end + len(encode_event(event)) < 512
    )
    made.append(filler)
    start, known = made._end, _copy(made.state)
    made.append(MessageRead("news", 1))
    made.close()
    data = (tmp_path / NAME).read_bytes()
    assert start < client_journal.SECTOR_BYTES < start + HEADER.size
    first_lost = data[:start] + bytes(512 - start) + data[512:]
    second_lost = data[:512] + bytes(len(data) - 512)
    for torn in (first_lost, second_lost):
        assert reopened(tmp_path, torn) == known


def test_changed_byte_is_reported_as_damage(tmp_path):
    steps = lived(tmp_path)
    data = (tmp_path / NAME).read_bytes()
    last_but_one = steps[-2][0]
    for at in range(len(MAGIC), last_but_one):
        changed = bytearray(data)
        changed[at] ^= 0x5A
        with pytest.raises(Damaged, match="is damaged"):
            reopened(tmp_path, bytes(changed))
        assert (tmp_path / NAME).read_bytes() == changed  # kept for inspection


def test_other_file_is_distinguished_from_a_damaged_journal(tmp_path):
    for data in (b"", b"polybus pirate journal 2\n", b"#!/bin/sh\n"):
        with pytest.raises(WrongFormat, match="journal"):
            reopened(tmp_path, data)
    with pytest.raises(Damaged):
        reopened(tmp_path, MAGIC)


def test_unknown_event_kind_is_not_skipped(tmp_path):
    lived(tmp_path)
    strange = b"\x91\x63"  # [99]
    head = HEADER.pack(len(strange), client_journal._length_checksum(len(strange)), crc32(strange))
    with pytest.raises(Damaged):
        reopened(tmp_path, (tmp_path / NAME).read_bytes() + head + strange)


@pytest.fixture(scope="module")
def whole():
    """A folder, the bytes of its journal, and their state."""
    with in_memory() as folder:
        known = lived(folder, LIFE[:4])[-1][1]
        yield folder, (folder / NAME).read_bytes(), known


@given(tail=st.binary(max_size=200))
def test_random_tail_is_cut_off_or_reported(whole, tail):
    folder, data, known = whole
    try:
        assert reopened(folder, data + tail) == known
    except Damaged:
        assert tail


# --- growing


def grown(folder: Path) -> Journal:
    made = client_journal.create_journal(folder, b"me")
    last = 0
    while made._end <= client_journal.GROWTH_BYTES:
        last += 1
        made.append(MessageRead("news", last))
    return made


def test_grown_journal_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr(client_journal, "GROWTH_BYTES", 3000)
    made = grown(tmp_path)
    last = made.state.lasts["news"]
    sizes = set()
    for more in range(1, 20):
        made.append(MessageRead("news", last + more))
        sizes.add((tmp_path / NAME).stat().st_size < 1000)
    assert sizes == {True, False} or sizes == {True}
    assert not (tmp_path / NEW).exists()
    made.close()
    found = client_journal.open_journal(tmp_path)
    assert found is not None
    assert found.state == made.state
    found.close()


def test_journal_is_not_rewritten_while_a_large_request_is_pending(tmp_path):
    made = client_journal.create_journal(tmp_path, b"me")
    made.append(RequestRecorded(1, "PUT", "news", bytes(3 * client_journal.GROWTH_BYTES)))
    assert (tmp_path / NAME).stat().st_size > 3 * client_journal.GROWTH_BYTES
    made.append(RequestAnswered(1, 1, "", True))
    assert (tmp_path / NAME).stat().st_size < 1000
    made.close()


def test_interrupted_rewrite_is_removed(tmp_path):
    steps = lived(tmp_path)
    (tmp_path / NEW).write_bytes(MAGIC + encode_event(IdAssigned(b"you")))
    found = client_journal.open_journal(tmp_path)
    assert found is not None
    assert found.state == steps[-1][1]
    assert not (tmp_path / NEW).exists()
    found.close()


# --- a disk that fails


def failing(monkeypatch, name, number=errno.ENOSPC):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def test_full_disk_changes_nothing(tmp_path, monkeypatch):
    made = client_journal.create_journal(tmp_path, b"me")
    made.append(MessageRead("news", 1))
    with monkeypatch.context() as patch:
        failing(patch, "pwrite")
        with pytest.raises(StoreFull, match=str(tmp_path)):
            made.append(MessageRead("news", 2))
    assert made.state.lasts == {"news": 1}
    made.append(MessageRead("news", 3))
    made.close()
    found = client_journal.open_journal(tmp_path)
    assert found is not None
    assert found.state.lasts == {"news": 3}
    found.close()


def test_partial_event_is_truncated(tmp_path, monkeypatch):
    made = client_journal.create_journal(tmp_path, b"me")
    honest = os.pwrite

    def half(descriptor, data, at):
        if len(data) < 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(descriptor, bytes(data[:4]), at)

    size = (tmp_path / NAME).stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        with pytest.raises(StoreFull):
            made.append(MessageRead("new", 2))
    assert (tmp_path / NAME).stat().st_size == size
    made.close()


def test_journal_is_unusable_after_a_failed_sync(tmp_path, monkeypatch):
    made = client_journal.create_journal(tmp_path, b"me")
    with monkeypatch.context() as patch:
        failing(patch, "fdatasync", errno.EIO)
        with pytest.raises(StoreFault):
            made.append(MessageRead("news", 2))
    assert made.state.lasts == {}
    with pytest.raises(StoreFault, match="open the folder again"):
        made.append(MessageRead("news", 2))
    made.close()


def rewritten_badly(folder, monkeypatch, fail):
    """Return a journal that is rewritten with each event, on a full disk."""
    lived(folder, LIFE[:4])
    monkeypatch.setattr(client_journal, "GROWTH_BYTES", 0)
    found = client_journal.open_journal(folder)
    assert found is not None
    with monkeypatch.context() as patch:
        fail(patch)
        found.append(MessageRead("news", 8))
    return found


def no_rename(patch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(Path, "rename", fail)


@pytest.mark.parametrize(
    "fail",
    [lambda patch: failing(patch, "open"), lambda patch: failing(patch, "fsync"), no_rename],
    ids=["open", "fsync", "rename"],
)
def test_journal_that_cannot_be_rewritten_is_kept(tmp_path, monkeypatch, fail):
    found = rewritten_badly(tmp_path, monkeypatch, fail)
    monkeypatch.setattr(client_journal, "GROWTH_BYTES", 10**9)
    found.append(MessageRead("news", 9))
    found.close()
    again = client_journal.open_journal(tmp_path)
    assert again is not None
    assert again.state.lasts == {"news": 9}
    again.close()


def test_unsynced_new_journal_is_not_used(tmp_path, monkeypatch):
    def no_folder(patch):
        def fail(_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(client_journal, "sync_folder", fail)

    found = rewritten_badly(tmp_path, monkeypatch, no_folder)
    with pytest.raises(StoreFault, match="may not be on disk"):
        found.append(MessageRead("news", 9))
    found.close()
    again = client_journal.open_journal(tmp_path)
    assert again is not None
    assert again.state.lasts == {"news": 8}
    again.close()
