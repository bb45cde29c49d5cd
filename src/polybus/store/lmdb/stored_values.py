"""Formats of the small values of a store.

Numbers are little-endian, other than in keys. Values that grow or that people may want to
read (topics, names) are JSON. The record of a topic has a magic and a checksum, so that
salvage finds it in the raw file and can verify it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from polybus.errors import Damaged
from polybus.kernel.blocks import xxh64
from polybus.model.commit import CommitResult, Span
from polybus.model.topic import Topic

FORMAT_VERSION: Final = 2

Buffer = bytes | memoryview

_NUMBER = Struct("<Q")


def encode_number(value: int) -> bytes:
    return _NUMBER.pack(value)


def read_number(raw: Buffer) -> int:
    return int.from_bytes(raw[:8], "little")


# --- counters


@dataclass(slots=True)
class StoreCounters:
    """The next number of each kind. Numbers are never reused."""

    topic: int = 1
    producer: int = 1
    stage: int = 1
    version: int = 1

    FORM = Struct("<QQQQ")

    def encode(self) -> bytes:
        return self.FORM.pack(self.topic, self.producer, self.stage, self.version)

    @classmethod
    def decode(cls, raw: Buffer) -> StoreCounters:
        return cls(*cls.FORM.unpack(raw))


# --- topics

TOPIC_MAGIC: Final = b"PBt1"
TOPIC_FORM: Final = Struct("<4sIQ")  # magic, length and checksum of the text


def encode_topic(topic: Topic, revision: int) -> bytes:
    """Encode a topic. By `revision`, salvage finds the newest of several records."""
    fields = {
        "name": topic.name,
        "number": topic.number,
        "generations": topic.generations,
        "settings": dict(topic.settings),
        "revision": revision,
    }
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    return TOPIC_FORM.pack(TOPIC_MAGIC, len(text), xxh64(text)) + text


def read_topic(raw: Buffer) -> tuple[Topic, int]:
    """Return the topic and its revision. Bytes after the record are ignored."""
    try:
        magic, length, checksum = TOPIC_FORM.unpack_from(raw)
        text = bytes(raw[TOPIC_FORM.size : TOPIC_FORM.size + length])
        if magic != TOPIC_MAGIC or xxh64(text) != checksum:
            raise ValueError("checksum")
        fields = json.loads(text)
        generations = tuple(fields["generations"])
        found = Topic(fields["name"], fields["number"], generations, fields["settings"])
        return found, fields["revision"]
    except Exception as error:
        raise Damaged(f"cannot read the record of a topic: {error}") from None


class NameRecord(NamedTuple):
    """The record of a topic name, which outlives its topics.

    `ends` are the highest offsets that shards of former topics reached; `next_id` is the
    first id if the topic is created again.
    """

    number: int
    is_live: bool
    next_id: int
    ends: tuple[int, ...]


def encode_name(name: NameRecord) -> bytes:
    return json.dumps(name).encode()


def read_name(raw: Buffer) -> NameRecord:
    """Return the record of a name. Raises `Damaged` if it cannot be decoded."""
    try:
        number, live, next_id, ends = json.loads(bytes(raw))
        found = NameRecord(number, live, next_id, tuple(ends))
        if not (live is True or live is False) or min(found.number, next_id, *ends, 0) < 0:
            raise ValueError("impossible values")
        return found
    except Exception as error:  # damaged bytes may raise anything
        raise Damaged(f"the record of its name is damaged: {error}") from None


# --- state of topics and shards

TOPIC_STATE: Final = Struct("<qq")  # next id, newest time
SHARD_STATE: Final = Struct("<qqq")  # start, end, bytes appended
SHARD_UPKEEP: Final = Struct("<qq")  # bytes removed, offset up to which it is re-blocked


# --- producers and their results

PRODUCER: Final = Struct("<IqQBH")  # number, epoch, last counter, dense, kept results

_RESULT = Struct("<QqHHH")  # counter, time, number of spans, bytes of digest, bytes of note
_SPAN = Struct("<IIqqq")
_RESULT_OF_ONE = Struct("<QqHHHIIqqq")  # with its one span, which nearly all results have


def encode_result(counter: int, digest: bytes, committed: CommitResult) -> bytes:
    spans, time_ns, _, note, _ = committed
    head = counter, time_ns, len(spans), len(digest), len(note)
    if len(spans) == 1:
        raw = _RESULT_OF_ONE.pack(*head, *spans[0])
    else:
        raw = _RESULT.pack(*head) + b"".join([_SPAN.pack(*span) for span in spans])
    return raw + digest + note if digest or note else raw


def counter_of(raw: Buffer) -> int:
    """Return the counter of an encoded result."""
    return int.from_bytes(raw[:8], "little")


def read_producer(raw: Buffer) -> tuple[int, int, int, bool, int]:
    """Return number, epoch, last counter, dense and kept results of a producer."""
    try:
        number, epoch, counter, dense, kept = PRODUCER.unpack(raw)
    except struct.error as error:
        raise Damaged(f"the record of a producer is damaged: {error}") from None
    return number, epoch, counter, bool(dense), kept


def read_result(raw: Buffer) -> tuple[int, bytes, CommitResult]:
    """Return counter, digest and result. Raises `Damaged` if they cannot be decoded."""
    try:
        return _decode_result(raw)
    except struct.error as error:
        raise Damaged(f"the result of a commit is damaged: {error}") from None


def _decode_result(raw: Buffer) -> tuple[int, bytes, CommitResult]:
    counter, time_ns, spans, digest, note = _RESULT.unpack_from(raw)
    digest_at = _RESULT.size + spans * _SPAN.size
    note_at = digest_at + digest
    listed = tuple(map(Span._make, _SPAN.iter_unpack(raw[_RESULT.size : digest_at])))
    committed = CommitResult(listed, time_ns, (), bytes(raw[note_at : note_at + note]))
    return counter, bytes(raw[digest_at:note_at]), committed


# --- stages and records

STAGE: Final = Struct("<d")  # lease in seconds
STAGE_SHARD: Final = Struct("<qq")  # messages and bytes that a stage holds for a shard


def encode_record(value: bytes, version: int) -> bytes:
    return _NUMBER.pack(version) + value


def read_record(raw: Buffer) -> tuple[bytes, int]:
    return bytes(raw[8:]), read_number(raw)
