"""The small values of a store: how each is written and read.

Little-endian, but for keys. What people may want to read or what grows (topics,
names) is JSON; a topic's record carries a magic and a checksum, so that salvage finds
it in the raw file and knows it for whole.
"""

from __future__ import annotations

import json
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
    """The next number of each kind; none is ever given twice."""

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
TOPIC_FORM: Final = Struct("<4sIQ")  # magic, length of the text, its checksum


def encode_topic(topic: Topic, revision: int) -> bytes:
    """`revision` tells salvage which of two records of one topic is the newer."""
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
    """The topic and its revision; may be followed by other bytes."""
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
        raise Damaged(f"the record of a topic cannot be read: {error}") from None


class NameRecord(NamedTuple):
    """What is known of a topic's name. `ends` are the highest offsets shards of it ever had
    before the topic that lives now, `next_id` where ids go on once it is created again."""

    number: int
    is_live: bool
    next_id: int
    ends: tuple[int, ...]


def encode_name(name: NameRecord) -> bytes:
    return json.dumps(name).encode()


def read_name(raw: Buffer) -> NameRecord:
    number, live, next_id, ends = json.loads(bytes(raw))
    return NameRecord(number, live, next_id, tuple(ends))


# --- state of topics and shards

TOPIC_STATE: Final = Struct("<qq")  # next id, newest time
SHARD_STATE: Final = Struct("<qqq")  # start, end, bytes it ever got
SHARD_UPKEEP: Final = Struct("<qq")  # bytes that went again, offset up to which it is re-blocked


# --- producers and their results

PRODUCER: Final = Struct("<IqQBH")  # number, epoch, last counter, dense, kept results

_RESULT = Struct("<QqHHH")  # counter, time; how many spans, bytes of digest, bytes of note
_SPAN = Struct("<IIqqq")
_RESULT_OF_ONE = Struct("<QqHHHIIqqq")  # and its span: what nearly all are


def encode_result(counter: int, digest: bytes, committed: CommitResult) -> bytes:
    spans, time_ns, _, note, _ = committed
    head = counter, time_ns, len(spans), len(digest), len(note)
    if len(spans) == 1:
        raw = _RESULT_OF_ONE.pack(*head, *spans[0])
    else:
        raw = _RESULT.pack(*head) + b"".join([_SPAN.pack(*span) for span in spans])
    return raw + digest + note if digest or note else raw


def counter_of(raw: Buffer) -> int:
    """Of a result: what it is the result of."""
    return int.from_bytes(raw[:8], "little")


def read_result(raw: Buffer) -> tuple[int, bytes, CommitResult]:
    counter, time_ns, spans, digest, note = _RESULT.unpack_from(raw)
    digest_at = _RESULT.size + spans * _SPAN.size
    note_at = digest_at + digest
    listed = tuple(map(Span._make, _SPAN.iter_unpack(raw[_RESULT.size : digest_at])))
    committed = CommitResult(listed, time_ns, (), bytes(raw[note_at : note_at + note]))
    return counter, bytes(raw[digest_at:note_at]), committed


# --- stages and records

STAGE: Final = Struct("<d")  # its lease in seconds
STAGE_SHARD: Final = Struct("<qq")  # messages and bytes that a stage holds for a shard


def encode_record(value: bytes, version: int) -> bytes:
    return _NUMBER.pack(version) + value


def read_record(raw: Buffer) -> tuple[bytes, int]:
    return bytes(raw[8:]), read_number(raw)
