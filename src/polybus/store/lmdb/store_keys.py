"""Keys of a store, which is one LMDB tree, by their first byte.

    c                               counters: the next topic, producer, stage, version
    f                               the format version
    g topic shard offset            the log: an entry, by its first offset
    n name                          a topic name: its number, or the ends of a dropped one
    p producer                      number, epoch and options of a producer
    q slot producer                 results of its last commits, in a ring of slots
    r key                           a record
    s topic                         next id and newest time of a topic
    s topic shard                   start and end of a shard, and the bytes appended to it
    t topic                         a topic: name, generations, settings
    u topic shard                   upkeep: bytes removed, offset up to which it is re-blocked
    v stage topic shard place       a staged block, by the position of its first message
    w stage                         a stage that can be published
    w stage topic shard             messages and bytes that it holds for a shard
    x kind …                        entries that are to be removed

Numbers are big-endian, so that keys sort as numbers do: topics and shards have 4 bytes,
offsets, positions and stages 8, slots 2. There is one tree instead of one per kind, because
a transaction is then one call into LMDB, and each call may switch to another thread.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from polybus.errors import DoesNotExist

MAX_TOPIC: Final = (1 << 32) - 1

COUNTERS: Final = b"c"
FORMAT: Final = b"f"
LOG: Final = b"g"
NAMES: Final = b"n"
PRODUCERS: Final = b"p"
RESULTS: Final = b"q"
RECORDS: Final = b"r"
STATE: Final = b"s"
TOPICS: Final = b"t"
UPKEEP: Final = b"u"
STAGED: Final = b"v"
STAGES: Final = b"w"
REMOVALS: Final = b"x"

# Kinds of removals.
DROPPED: Final = b"xd"
TRIMMED: Final = b"xt"
UNSTAGED: Final = b"xu"

_TOPIC = Struct(">cI")
_SHARD = Struct(">cII")
_LOG = Struct(">cIIQ")
_RESULT = Struct(">cHI")
_STAGE = Struct(">cQ")
_STAGE_SHARD = Struct(">cQII")
_STAGED = Struct(">cQIIQ")
_REMOVAL_TOPIC = Struct(">2sI")
_REMOVAL_SHARD = Struct(">2sII")
_REMOVAL_STAGE = Struct(">2sQ")


def log(topic: int, shard: int, offset: int) -> bytes:
    return _LOG.pack(LOG, topic, shard, offset)


def place_in_log(key: bytes | memoryview) -> tuple[int, int, int]:
    """Return topic, shard and first offset of the key of an entry."""
    _, topic, shard, offset = _LOG.unpack(key)
    return topic, shard, offset


def log_of_shard(topic: int, shard: int) -> bytes:
    """Return the prefix of all keys of a shard's log."""
    return _SHARD.pack(LOG, topic, shard)


def log_of_topic(topic: int) -> bytes:
    return _TOPIC.pack(LOG, topic)


def name(raw: bytes) -> bytes:
    return NAMES + raw


def producer(raw: bytes) -> bytes:
    return PRODUCERS + raw


def result(producer: int, slot: int) -> bytes:
    # The slot comes first: producers that commit together are at about the same slot, so
    # their results share a few pages instead of changing one page each.
    return _RESULT.pack(RESULTS, slot, producer)


def record(key: bytes) -> bytes:
    return RECORDS + key


def topic(number: int) -> bytes:
    """Return the key of a topic. Raises `DoesNotExist` if no topic can have the number."""
    if not 0 <= number <= MAX_TOPIC:
        raise DoesNotExist(f"no topic has number {number}")
    return _TOPIC.pack(TOPICS, number)


def state(topic: int) -> bytes:
    return _TOPIC.pack(STATE, topic)


def shard_state(topic: int, shard: int) -> bytes:
    return _SHARD.pack(STATE, topic, shard)


def upkeep(topic: int, shard: int) -> bytes:
    return _SHARD.pack(UPKEEP, topic, shard)


def upkeep_of_topic(topic: int) -> bytes:
    return _TOPIC.pack(UPKEEP, topic)


def shard_of_state(key: bytes | memoryview) -> tuple[int, int]:
    """Return topic and shard of a key of `shard_state` or `upkeep`."""
    _, topic, shard = _SHARD.unpack(key)
    return topic, shard


def stage(stage: int) -> bytes:
    return _STAGE.pack(STAGES, stage)


def stage_shard(stage: int, topic: int, shard: int) -> bytes:
    return _STAGE_SHARD.pack(STAGES, stage, topic, shard)


def target_of_stage(key: bytes | memoryview) -> tuple[int, int]:
    """Return topic and shard of a key of `stage_shard`."""
    _, _, topic, shard = _STAGE_SHARD.unpack(key)
    return topic, shard


def staged(stage: int, topic: int, shard: int, place: int) -> bytes:
    return _STAGED.pack(STAGED, stage, topic, shard, place)


def staged_of_shard(stage: int, topic: int, shard: int) -> bytes:
    return _STAGE_SHARD.pack(STAGED, stage, topic, shard)


def staged_of_stage(stage: int) -> bytes:
    return _STAGE.pack(STAGED, stage)


def dropped(topic: int) -> bytes:
    return _REMOVAL_TOPIC.pack(DROPPED, topic)


def trimmed(topic: int, shard: int) -> bytes:
    return _REMOVAL_SHARD.pack(TRIMMED, topic, shard)


def unstaged(stage: int) -> bytes:
    return _REMOVAL_STAGE.pack(UNSTAGED, stage)


def removal_target(key: bytes | memoryview) -> tuple[int, ...]:
    """Return the numbers in a removal key: a topic, a topic and a shard, or a stage.

    Returns none of them if the key is not a removal key.
    """
    forms = {DROPPED: _REMOVAL_TOPIC, TRIMMED: _REMOVAL_SHARD, UNSTAGED: _REMOVAL_STAGE}
    form = forms.get(bytes(key[:2]))
    if form is None or len(key) != form.size:
        return ()
    return tuple(form.unpack(key)[1:])
