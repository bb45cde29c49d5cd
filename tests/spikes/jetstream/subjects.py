"""Subjects in the namespace's one stream.

    ns.b.<topic>.<shard>            the log: blocks and extents, in the order of their offsets
    ns.n.<topic>                    the tail of a topic: next id, time, begin and end of each shard
    ns.t.<name>, ns.m               topics by name; the last number that a topic got
    ns.r.k.<byte>.<byte>…           records, one token per byte, so that a wildcard is a prefix
    ns.p.<producer>.h and .<slot>   a producer: its epoch and counters, and its kept results
    ns.l.<stage>                    a stage: its state, the counts of its blocks, its lease
    ns.g.<stage>.<topic>.<shard>    the blocks of a stage
    ns.w.<bus>                      the last batch of a bus, read after a lost answer

All but the log and the stages' blocks are heads: only the last message of the subject
counts, and each new one rolls up (removes) those before it.
"""

from __future__ import annotations

STREAM = "ns"


def log(topic: int, shard: int | str) -> str:
    return f"ns.b.{topic}.{shard}"


def tail(topic: int) -> str:
    return f"ns.n.{topic}"


def topic_named(name: str) -> str:
    return f"ns.t.{name.encode().hex()}"


NUMBERS = "ns.m"


def record(key: bytes) -> str:
    return ".".join(["ns.r.k", *(f"{byte:02x}" for byte in key)])


def key_of(subject: str) -> bytes:
    """The key of a record's subject."""
    return bytes.fromhex("".join(subject.split(".")[3:]))


def producer(name: str) -> str:
    return f"ns.p.{name.encode().hex()}.h"


def result(name: str, slot: int) -> str:
    return f"ns.p.{name.encode().hex()}.{slot}"


def lease(stage: str) -> str:
    return f"ns.l.{stage}"


def staged(stage: str, topic: int | str, shard: int | str) -> str:
    return f"ns.g.{stage}.{topic}.{shard}"


def diary(bus: str) -> str:
    return f"ns.w.{bus}"
