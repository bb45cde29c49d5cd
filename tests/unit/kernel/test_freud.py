"""Freud's requests: groups, limits of a scan, malformed frames."""

from __future__ import annotations

import gc
import struct
import tracemalloc
import weakref
from array import array

import pytest

from polybus.dialects.freud.client.answer_batch import encode_gets, encode_produces
from polybus.dialects.freud.server.request_scanner import (
    MAX_GROUP_MESSAGES,
    MAX_SCAN_BODY_BYTES,
    MAX_SCAN_GROUPS,
    REASONS,
    TOO_SHORT,
    GetRun,
    Group,
    MalformedFrame,
    ProduceRun,
    RequestScanner,
    SingleRequest,
)

CAP = 2 * MAX_SCAN_BODY_BYTES
ID = bytes(range(16))
LIST = struct.pack("<II", 6, 0)
UNKNOWN = struct.pack("<II", 99, 0)
TOO_LARGE = struct.pack("<II", 4, CAP + 1)


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


def named(kind: int, name: bytes) -> bytes:
    return frame(kind, struct.pack("<I", len(name)) + name)


def produce(name: bytes, *bodies: bytes) -> bytes:
    return encode_produces(name, bodies, CAP)


def everything_is_a_name(raw: bytes) -> bool:
    return True


def scanner() -> RequestScanner:
    return RequestScanner(CAP, everything_is_a_name)


def groups_of(data: bytes) -> list[Group]:
    scanned = scanner().scan(data, 0, len(data))
    assert (scanned.consumed, scanned.more, scanned.bad) == (len(data), False, False)
    return scanned.groups


def shape(groups: list[Group]) -> list[tuple[str, int]]:
    return [(type(group).__name__, getattr(group, "count", 1)) for group in groups]


class TestGroups:
    def test_produces_to_one_topic_are_columns(self):
        (group,) = groups_of(produce(b"t", b"one", b"", b"three"))
        assert isinstance(group, ProduceRun)
        assert (group.topic, group.count, group.bodies) == (b"t", 3, b"onethree")
        assert list(array("i", group.offsets)) == [0, 3, 3, 8]

    def test_empty_body_at_the_end_belongs_to_its_group(self):
        assert shape(groups_of(produce(b"t", b"1", b"", b""))) == [("ProduceRun", 3)]

    def test_another_topic_is_another_group(self):
        groups = groups_of(produce(b"a", b"1", b"2") + produce(b"b", b"3") + produce(b"a", b"4"))
        assert shape(groups) == [("ProduceRun", 2), ("ProduceRun", 1), ("ProduceRun", 1)]

    @pytest.mark.parametrize("pair", [(b"a", b"ab"), (b"ab", b"a"), (b"a", b"b"), (b"ab", b"ac")])
    def test_similar_names_are_different_groups(self, pair):
        groups = groups_of(produce(pair[0], b"1") + produce(pair[1], b"2"))
        assert [(one.topic, one.bodies) for one in groups] == [  # type: ignore[union-attr]
            (pair[0], b"1"),
            (pair[1], b"2"),
        ]

    @pytest.mark.parametrize("length", [0, 2, 0x0100_0001, 2**32 - 1])
    def test_names_are_compared_by_length_and_bytes(self, length):
        """The second request has the first one's bytes where its name would be."""
        other = frame(4, struct.pack("<I", length) + b"a,")
        groups = groups_of(produce(b"a", b",") + other)
        assert shape(groups) == [("ProduceRun", 1), ("MalformedFrame", 1)]

    @pytest.mark.parametrize("between", [LIST, UNKNOWN, named(4, b"_")])
    def test_other_requests_between_produces_keep_their_order(self, between):
        groups = groups_of(produce(b"t", b"1") + between + produce(b"t", b"2"))
        assert [type(group) for group in groups[::2]] == [ProduceRun, ProduceRun]
        assert isinstance(groups[1], SingleRequest | MalformedFrame)

    def test_equal_gets_are_one_group(self):
        (group,) = groups_of(encode_gets(ID, 1000, -1))
        assert isinstance(group, GetRun)
        assert (group.subscriber, group.count, group.max_blocking_s) == (ID, 1000, -1)
        assert group.records is False

    @pytest.mark.parametrize(
        "other",
        [
            encode_gets(ID[::-1], 1, 5),
            encode_gets(ID, 1, 6),
            encode_gets(ID, 1, 5 + (1 << 24)),
            encode_gets(ID, 1, 5, True),
        ],
        ids=["id", "wait", "last byte of the wait", "type"],
    )
    def test_different_gets_are_different_groups(self, other):
        groups = groups_of(encode_gets(ID, 2, 5) + other + encode_gets(ID, 3, 5))
        assert shape(groups) == [("GetRun", 2), ("GetRun", 1), ("GetRun", 3)]

    @pytest.mark.parametrize("kind", [0, 1, 2, 7])
    def test_requests_with_a_name(self, kind):
        (group,) = groups_of(named(kind, b"news"))
        assert isinstance(group, SingleRequest)
        assert (group.type, group.subject) == (kind, b"news")

    def test_repeated_name_is_the_same_object(self):
        """The name is one object per group, so a lookup hashes it once."""
        groups = groups_of(produce(b"news", b"1") + LIST + produce(b"news", b"2") + LIST)
        assert groups[0].topic is groups[2].topic  # type: ignore[union-attr]

    def test_groups_have_a_repr(self):
        data = produce(b"t", b"1") + encode_gets(bytes(16), 2, 3, True) + LIST + UNKNOWN + TOO_LARGE
        assert repr(scanner().scan(data, 0, len(data))) == (
            "ScanResult(77 bytes, [ProduceRun(b't', 1 messages, 1 bytes),"
            f" GetRun({'0' * 32}, 2 records, 3 s), SingleRequest(6, b''),"
            " MalformedFrame('unknown_type'),"
            " MalformedFrame('too_large', closes)], more=False, bad=True)"
        ).replace("77", str(len(data) - len(TOO_LARGE)))


class TestBounds:
    def test_scan_stops_at_its_byte_limit_and_continues(self):
        body = bytes(100_000)
        data = produce(b"t", *[body] * 25)
        assert self.counts(data) == [[10], [10], [5]]

    def test_body_over_the_byte_limit_is_a_scan_of_its_own(self):
        large = bytes(MAX_SCAN_BODY_BYTES + 1)
        data = produce(b"t", b"1", large, b"2", b"3")
        assert self.counts(data) == [[1], [1], [2]]

    def test_largest_body_fits_the_scan_exactly(self):
        data = produce(b"t", bytes(MAX_SCAN_BODY_BYTES - 1), b"1", b"", b"2")
        assert self.counts(data) == [[3], [1]]

    def test_messages_of_a_group_are_limited(self):
        data = produce(b"t", *[b""] * (MAX_GROUP_MESSAGES + 1))
        assert self.counts(data) == [[MAX_GROUP_MESSAGES, 1]]

    @pytest.mark.parametrize("request_", [LIST, UNKNOWN], ids=["good", "malformed"])
    def test_groups_of_a_scan_are_limited(self, request_):
        data = request_ * (MAX_SCAN_GROUPS + 1)
        assert list(map(len, self.counts(data))) == [MAX_SCAN_GROUPS, 1]

    def test_full_scan_ends_before_a_malformed_frame(self):
        data = LIST * MAX_SCAN_GROUPS + TOO_LARGE
        scanned = scanner().scan(data, 0, len(data))
        assert (scanned.more, scanned.bad) == (True, False)
        scanned = scanner().scan(data, scanned.consumed, len(data))
        assert (scanned.consumed, scanned.more, scanned.bad) == (0, False, True)

    def test_incomplete_request_after_a_full_scan_is_not_reported_as_more(self):
        data = LIST * MAX_SCAN_GROUPS + produce(b"t", b"body")[:-1]
        scanned = scanner().scan(data, 0, len(data))
        assert (scanned.consumed, scanned.more) == (8 * MAX_SCAN_GROUPS, False)

    def counts(self, data: bytes) -> list[list[int]]:
        """The sizes of the groups, scan by scan."""
        found, at, more = [], 0, True
        while more:
            scanned = scanner().scan(data, at, len(data))
            at += scanned.consumed
            more = scanned.more
            found.append([count for _, count in shape(scanned.groups)])
        assert at == len(data)
        return found


class TestFaults:
    @pytest.mark.parametrize("size", [8, len(TOO_LARGE) + 3, CAP + 100])
    def test_frame_over_the_limit_ends_the_scan(self, size):
        data = LIST + (TOO_LARGE + bytes(CAP))[:size]
        scanned = scanner().scan(data, 0, len(data))
        assert (scanned.consumed, scanned.bad) == (len(LIST), True)
        assert isinstance(scanned.groups[-1], MalformedFrame)
        assert (scanned.groups[-1].reason, scanned.groups[-1].closes) == ("too_large", True)

    @pytest.mark.parametrize("extra", [0, 1])
    def test_frame_over_the_limit_after_valid_ones_is_rejected(self, extra):
        """The largest body is one of a run, the next larger one ends the stream."""
        reader = RequestScanner(100, everything_is_a_name)
        data = encode_produces(b"t", [b"1", bytes(95 + extra), b"2"], 101)
        scanned = reader.scan(data, 0, len(data))
        assert (len(scanned.groups), scanned.bad) == ((2, True) if extra else (1, False))
        assert shape(scanned.groups)[0] == ("ProduceRun", 1 if extra else 3)

    def test_limit_is_checked_once_the_header_is_complete(self):
        scanned = scanner().scan(TOO_LARGE, 0, 7)
        assert (scanned.consumed, scanned.groups, scanned.bad) == (0, [], False)

    @pytest.mark.parametrize("max_frame_bytes", [len(LIST), 0x7FFFFFFF])
    def test_announced_length_allocates_nothing(self, max_frame_bytes):
        header = struct.pack("<II", 4, 0x7FFFFFFF)
        reader = RequestScanner(max_frame_bytes, everything_is_a_name)
        tracemalloc.start()
        try:
            reader.scan(header, 0, len(header))
            assert tracemalloc.get_traced_memory()[1] < 10_000
        finally:
            tracemalloc.stop()

    def test_frames_cover_every_reason(self):
        data = b"".join(
            (
                UNKNOWN,
                frame(3, bytes(15)),
                frame(3, bytes(17)),
                named(0, b"*"),
                TOO_LARGE,
            )
        )
        groups = scanner().scan(data, 0, len(data)).groups
        assert {group.reason for group in groups} == set(REASONS) - {TOO_SHORT}  # type: ignore[union-attr]
        assert [group.closes for group in groups] == [False] * 4 + [True]  # type: ignore[union-attr]


class TestNames:
    def test_only_non_ascii_names_are_checked_by_the_callback_and_once(self):
        asked = []

        def is_name(raw: bytes) -> bool:
            asked.append(raw)
            return raw != "ä".encode()

        reader = RequestScanner(CAP, is_name)
        names = (b"a", b"_", b"a,", "ü".encode(), "ü".encode(), "ä".encode(), "ä".encode(), b"a")
        data = b"".join(named(0, name) for name in names) + produce("ä".encode(), b"1", b"2")
        groups = reader.scan(data, 0, len(data)).groups
        good = [isinstance(group, SingleRequest) for group in groups[: len(names)]]
        assert good == [True, False, False, True, True, False, False, True]
        assert asked == ["ü".encode(), "ä".encode(), "ä".encode()]

    def test_invalid_ascii_name_is_invalid_with_a_suffix(self):
        (group,) = groups_of(named(0, "_ü".encode()))
        assert isinstance(group, MalformedFrame)

    def test_failing_name_check_changes_nothing(self):
        def is_name(raw: bytes) -> bool:
            raise LookupError(raw)

        reader = RequestScanner(CAP, is_name)
        data = bytearray(named(0, b"a") + named(0, "ü".encode()))
        for _ in range(2):
            with pytest.raises(LookupError):
                reader.scan(data, 0, len(data))
        data.clear()  # no longer held
        (group,) = reader.scan(named(1, b"a"), 0, 13).groups
        assert group.subject == b"a"  # type: ignore[union-attr]

    def test_scan_inside_a_name_check_is_rejected(self):
        def is_name(raw: bytes) -> bool:
            reader.scan(LIST, 0, len(LIST))
            return True

        reader = RequestScanner(CAP, is_name)
        data = named(0, "ü".encode())
        with pytest.raises(RuntimeError, match="already"):
            reader.scan(data, 0, len(data))
        assert reader.scan(LIST, 0, len(LIST)).consumed == len(LIST)

    def test_scanner_in_a_reference_cycle_is_collected(self):
        class Owner:
            def __init__(self) -> None:
                self.scanner = RequestScanner(CAP, self.is_name)

            def is_name(self, raw: bytes) -> bool:
                return True

        seen = weakref.ref(Owner())
        gc.collect()
        assert seen() is None


class TestArguments:
    @pytest.mark.parametrize("region", [(-1, 0), (0, 9), (5, 4)])
    def test_region_outside_the_buffer_is_rejected(self, region):
        start, end = region
        with pytest.raises(ValueError, match="within the buffer"):
            scanner().scan(LIST, start, end)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_contiguous_buffer_is_accepted(self, kind):
        assert scanner().scan(kind(LIST), 0, 8).consumed == 8

    @pytest.mark.parametrize("cap", [-1, 0, 1 << 31])
    def test_invalid_frame_limit_is_rejected(self, cap):
        with pytest.raises(ValueError, match="max_frame_bytes"):
            RequestScanner(cap, everything_is_a_name)

    def test_groups_copy_the_received_bytes(self):
        data = bytearray(produce(b"t", b"body") + encode_gets(ID, 1, 0))
        groups = scanner().scan(data, 0, len(data)).groups
        data[:] = bytes(len(data))
        assert (groups[0].topic, groups[0].bodies) == (b"t", b"body")  # type: ignore[union-attr]
        assert groups[1].subscriber == ID  # type: ignore[union-attr]
