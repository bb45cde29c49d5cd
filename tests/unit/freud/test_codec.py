"""Freud's frames: golden vectors in both directions, sizes at their bounds, and errors."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from polybus.dialects.freud import codec
from polybus.dialects.freud.client.answer_batch import (
    Answer,
    AnswerBatch,
    encode_gets,
    scan_answers,
)
from polybus.dialects.freud.codec import Code, RequestType
from polybus.dialects.freud.server import answer_encoder
from polybus.dialects.freud.server.answer_encoder import encode_answers
from polybus.dialects.freud.server.request_scanner import (
    REASONS,
    TOO_SHORT,
    GetRun,
    Group,
    MalformedFrame,
    ProduceRun,
    RequestScanner,
    SingleRequest,
)
from polybus.errors import BadFrame, TooLarge, UsageError
from polybus.model import topic_name
from tests.rig.oracle import freud as oracle
from tests.vectors.freud import MAX_FRAME_BYTES, Vector, vectors

ID = bytes(range(16))
LIST = codec.list_topics()
LISTED = {"type": "list topics"}
NO = encode_answers(Code.NO, 1)

REQUESTS = vectors("client")
ANSWERS = vectors("server")


def good(every: list[Vector]) -> list[Vector]:
    return [one for one in every if one.value is not None]


def bad(every: list[Vector]) -> list[Vector]:
    return [one for one in every if one.bad is not None]


# --- requests ----------------------------------------------------------------

BUILDERS: dict[str, Callable[..., bytes]] = {
    "create topic": codec.create_topic,
    "delete topic": codec.delete_topic,
    "subscribe": codec.subscribe,
    "unsubscribe": codec.unsubscribe,
    "produce": codec.produce,
    "get message": lambda key, wait: encode_gets(key, 1, wait),
    "list topics": codec.list_topics,
    "count subscribers": codec.count_subscribers,
    "get record": lambda key, wait: encode_gets(key, 1, wait, True),
}
TYPES = {kind.name.lower().replace("_", " "): kind for kind in RequestType}


def scanned(data: bytes, piece_bytes: int) -> tuple[list[dict[str, Any]], int, bool]:
    """Scan `data` in pieces. Returns the requests, the bytes consumed, and if the stream ended."""
    found: list[dict[str, Any]] = []
    consumed = 0
    scanner = RequestScanner(MAX_FRAME_BYTES, topic_name.is_shared)
    for end in [*range(piece_bytes, len(data), piece_bytes), len(data)]:
        scan = scanner.scan(data, consumed, end)
        consumed += scan.consumed
        found += [value for group in scan.groups for value in values(group)]
        if scan.bad:
            return found, consumed, True
    return found, consumed, False


def values(group: Group) -> Iterator[dict[str, Any]]:
    match group:
        case ProduceRun():
            ends = array("i", group.offsets)
            for start, end in pairwise(ends):
                yield {"type": "produce", "topic": group.topic, "body": group.bodies[start:end]}
        case GetRun():
            value = {"subscriber": group.subscriber, "max_blocking_s": group.max_blocking_s}
            for _ in range(group.count):
                yield {"type": "get record" if group.records else "get message", **value}
        case SingleRequest():
            kind = RequestType(group.type).name.lower().replace("_", " ")
            subject = {"unsubscribe": "subscriber", "list topics": None}.get(kind, "topic")
            yield {"type": kind, **({subject: group.subject} if subject else {})}
        case MalformedFrame():
            yield {"bad": group.reason}


class TestRequests:
    @pytest.mark.parametrize("vector", good(REQUESTS), ids=str)
    def test_values_encode_to_the_golden_bytes(self, vector: Vector):
        assert vector.value is not None
        fields = dict(vector.value)
        kind = fields.pop("type")
        assert BUILDERS[kind](*fields.values()) == vector.frame
        assert struct.unpack("<I", vector.frame[:4]) == (TYPES[kind],)

    @pytest.mark.parametrize("piece_bytes", [10_000, 1])
    @pytest.mark.parametrize("vector", good(REQUESTS), ids=str)
    def test_golden_bytes_decode_to_values(self, vector: Vector, piece_bytes: int):
        found = scanned(vector.frame, piece_bytes)
        assert found == ([vector.value], len(vector.frame), False)

    @pytest.mark.parametrize("piece_bytes", [10_000, 1])
    @pytest.mark.parametrize("vector", bad(REQUESTS), ids=str)
    def test_malformed_requests_have_a_reason_and_only_oversized_ones_end_the_stream(
        self, vector: Vector, piece_bytes: int
    ):
        """The next request is decoded, unless the malformed one ends the stream."""
        data = LIST + vector.frame + LIST
        found = [LISTED, {"bad": vector.bad}]
        if vector.bad == "too_large":
            assert scanned(data, piece_bytes) == (found, len(LIST), True)
        else:
            assert scanned(data, piece_bytes) == ([*found, LISTED], len(data), False)

    @pytest.mark.parametrize("piece_bytes", [1_000_000, 7])
    def test_all_vectors_decode_from_one_stream(self, piece_bytes: int):
        alive = [one for one in REQUESTS if one.bad != "too_large"]
        data = b"".join(one.frame for one in alive)
        expected = [one.value or {"bad": one.bad} for one in alive]
        assert scanned(data, piece_bytes) == (expected, len(data), False)

    @pytest.mark.parametrize("vector", REQUESTS, ids=str)
    def test_oracle_gives_the_same_reason(self, vector: Vector):
        _, (one, *rest) = oracle.scan(vector.frame, MAX_FRAME_BYTES)
        assert rest == []
        assert getattr(one, "reason", None) == vector.bad

    def test_every_type_and_every_reason_has_a_vector(self):
        assert {one.value["type"] for one in good(REQUESTS) if one.value} == set(TYPES)
        # TOO_SHORT exists in the second framing alone: tests/unit/freud/test_second_framing.py.
        assert {one.bad for one in bad(REQUESTS)} == set(REASONS) - {TOO_SHORT}

    @pytest.mark.parametrize("subscriber", [b"", ID[:15], ID + b"\0"])
    def test_subscriber_id_must_have_16_bytes(self, subscriber: bytes):
        with pytest.raises(UsageError, match="16 bytes"):
            codec.unsubscribe(subscriber)
        with pytest.raises(ValueError, match="16 bytes"):
            encode_gets(subscriber, 1, 0)

    @pytest.mark.parametrize("wait", [2**31, -(2**31) - 1])
    def test_max_blocking_must_fit_32_bits(self, wait: int):
        with pytest.raises(OverflowError):
            encode_gets(ID, 1, wait)


class TestSizes:
    @pytest.mark.parametrize("length", [1, 255])
    def test_largest_body_fills_a_frame_exactly(self, length: int):
        name = b"n" * length
        most = codec.max_body(name, MAX_FRAME_BYTES)
        frame = codec.produce(name, bytes(most), MAX_FRAME_BYTES)
        assert struct.unpack("<I", frame[4:8]) == (MAX_FRAME_BYTES,)
        with pytest.raises(TooLarge, match=str(most)):
            codec.produce(name, bytes(most + 1), MAX_FRAME_BYTES)

    def test_default_frame_limit_is_16_mib_of_payload(self):
        name = b"news"
        assert codec.max_body(name) == 16 * 1024 * 1024 - 8
        assert len(codec.produce(name, bytes(codec.max_body(name)))) == 8 + 16 * 1024 * 1024
        with pytest.raises(TooLarge):
            codec.produce(name, bytes(codec.max_body(name) + 1))

    @pytest.mark.parametrize("cap", [0, 259, 2**31])
    def test_invalid_frame_limit_is_rejected(self, cap: int):
        with pytest.raises(UsageError, match="max_frame_bytes"):
            codec.check_max_frame_bytes(cap)

    @pytest.mark.parametrize("cap", [260, 2**31 - 1])
    def test_kernel_accepts_every_valid_frame_limit(self, cap: int):
        scanner = RequestScanner(codec.check_max_frame_bytes(cap), topic_name.is_shared)
        assert scanner.max_frame_bytes == cap


# --- answers -----------------------------------------------------------------


def build_answer(asked: str | None, value: dict[str, Any]) -> bytes:
    match asked, value:
        case _, {"code": code, "text": text}:
            return encode_answers(code, 1, text.encode())
        case "subscribe", {"subscriber": subscriber}:
            return encode_answers(Code.OK, 1, subscriber)
        case "produce", {"message_id": message_id}:
            return answer_encoder.encode_produced(message_id, 1)
        case "get message", {"body": body}:
            return answer_encoder.encode_messages(array("i", [0, len(body)]), body, 0, 1)
        case "get record", {"message_id": first, "timestamp_ns": time, **rest}:
            columns = array("i", [0, len(rest["body"])]), rest["body"]
            return answer_encoder.encode_records(
                first, array("Q", [time]), rest["flags"], *columns, 0, 1
            )
        case "list topics", {"topics": found}:
            return encode_answers(Code.OK, 1, codec.topic_list(found))
        case "count subscribers", {"count": count}:
            return encode_answers(Code.OK, 1, codec.subscriber_count(count))
    return encode_answers(value["code"], 1)


def read_answer(asked: str | None, answers: AnswerBatch) -> dict[str, Any]:
    answer = next(iter(answers))
    payload = answer.payload
    value: dict[str, Any] = {"code": answer.code}
    if asked == "subscribe":
        value["subscriber"] = codec.read_subscriber(payload)
    elif asked == "produce":
        value["message_id"] = codec.read_message_id(payload)
    elif asked == "get message":
        value["body"] = payload
    elif asked == "get record":
        (record,) = answers.records(0, 1)
        fields = ("message_id", "timestamp_ns", "flags", "body")
        value |= {field: getattr(record, field) for field in fields}
    elif asked == "list topics":
        value["topics"] = codec.read_topics(payload)
    elif asked == "count subscribers":
        value["count"] = codec.read_count(payload)
    elif answer.code >= Code.MALFORMED_REQUEST:
        value["text"] = payload.decode()
    else:
        assert not payload
    return value


class TestAnswers:
    @pytest.mark.parametrize("vector", good(ANSWERS), ids=str)
    def test_values_encode_to_the_golden_bytes(self, vector: Vector):
        assert vector.value is not None
        assert build_answer(vector.asked, vector.value) == vector.frame

    @pytest.mark.parametrize("piece_bytes", [10_000, 1])
    @pytest.mark.parametrize("vector", good(ANSWERS), ids=str)
    def test_golden_bytes_decode_to_values(self, vector: Vector, piece_bytes: int):
        data, consumed, found = vector.frame + NO, 0, []
        for end in [*range(piece_bytes, len(data), piece_bytes), len(data)]:
            took, batch, too_large = scan_answers(data, consumed, end, MAX_FRAME_BYTES)
            assert not too_large
            consumed += took
            found += [batch] if len(batch) else []
        assert consumed == len(data)
        assert [one.code for batch in found for one in batch][1:] == [Code.NO]
        assert read_answer(vector.asked, found[0]) == vector.value

    @pytest.mark.parametrize("vector", bad(ANSWERS), ids=str)
    def test_answer_over_the_frame_limit_is_detected_from_its_header(self, vector: Vector):
        data = NO + vector.frame
        for end in range(9, 16):
            assert scan_answers(data, 8, end, MAX_FRAME_BYTES)[::2] == (0, False)
        consumed, batch, too_large = scan_answers(data, 0, 16, MAX_FRAME_BYTES)
        assert (consumed, list(batch), too_large) == (8, [Answer(Code.NO, b"")], True)

    def test_every_code_and_every_type_has_a_vector(self):
        assert {one.value["code"] for one in good(ANSWERS) if one.value} == set(Code)
        assert {one.asked for one in ANSWERS} - {"anything"} == set(TYPES)

    def test_code_labels_are_those_of_the_spec(self):
        assert {int(code): code.label for code in Code} == {
            0: "Ok",
            1: "Nothing Happened",
            2: "No",
            3: "Doesn't Exist",
            4: "Malformed Request",
            5: "Server Error",
        }

    @pytest.mark.parametrize("reason", REASONS)
    def test_every_malformed_reason_has_an_explanation(self, reason: str):
        assert len(codec.MALFORMED_TEXTS[reason]) > 20

    @pytest.mark.parametrize(
        ("read", "payload"),
        [
            (codec.read_subscriber, ID[:15]),
            (codec.read_subscriber, ID + b"\0"),
            (codec.read_message_id, bytes(7)),
            (codec.read_message_id, bytes(9)),
            (codec.read_count, b""),
            (codec.read_count, bytes(5)),
            (codec.read_topics, b""),
            (codec.read_topics, struct.pack("<I", 1)),
            (codec.read_topics, struct.pack("<II", 1, 1)),
            (codec.read_topics, struct.pack("<II", 2, 1) + b"n"),
            (codec.read_topics, struct.pack("<II", 1, 1) + b"n!"),
            (codec.read_topics, struct.pack("<I", 2**32 - 1)),
            (codec.read_topics, struct.pack("<II", 1, 2**32 - 1) + b"n"),
        ],
    )
    def test_ok_answer_with_an_invalid_payload_raises_bad_frame(
        self, read: Callable[[bytes], object], payload: bytes
    ):
        with pytest.raises(BadFrame):
            read(payload)


class TestNotices:
    def test_a_notice_names_the_topic(self):
        assert codec.deletion_notice(b"news") == b"\x00FREUD\x00DELETED\x00news"

    def test_only_flagged_records_are_notices(self):
        payload = struct.Struct("<QQI").pack
        body = codec.deletion_notice(b"n")
        for flags in (codec.NOTICE_FLAG, 0):
            data = encode_answers(Code.OK, 1, payload(1, 2, flags) + body)
            (record,) = scan_answers(data, 0, len(data), MAX_FRAME_BYTES)[1].records(0, 1)
            assert record.is_notice == bool(flags)

    def test_record_shorter_than_its_head_is_refused(self):
        data = encode_answers(Code.OK, 1, bytes(19))
        batch = scan_answers(data, 0, len(data), MAX_FRAME_BYTES)[1]
        with pytest.raises(ValueError, match="20 bytes"):
            batch.records(0, 1)


def test_public_names_resolve():
    from polybus.dialects import freud

    assert set(freud.__all__) <= set(dir(freud))
    assert all(getattr(freud, name) is not None for name in freud.__all__)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = freud.nothing_such
