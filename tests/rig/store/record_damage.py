"""Damage of single records in the file of a store that no process has open.

LMDB's pages stay intact: a record gets another value, or is removed. A flipped bit in a value or
in a key has the same effect, but at a random place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb

from polybus.store.lmdb import store_keys, stored_values

MAP_BYTES = 1 << 30
Change = Callable[[bytes], bytes | None]


def flip_bit(raw: bytes) -> bytes:
    """Flip a bit in the middle."""
    changed = bytearray(raw)
    changed[len(raw) // 2] ^= 0x10
    return bytes(changed)


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def remove(_raw: bytes) -> None:
    return None


def data_file(data: Path) -> Path:
    (found,) = data.glob("store/*/data.mdb")
    return found


def read_records(data: Path, prefix: bytes = b"") -> dict[bytes, bytes]:
    with (
        lmdb.open(str(data_file(data).parent), map_size=MAP_BYTES, lock=False) as environment,
        environment.begin() as transaction,
    ):
        found = {bytes(key): bytes(value) for key, value in transaction.cursor()}
    return {key: value for key, value in found.items() if key.startswith(prefix)}


def change_record(data: Path, key: bytes, change: Change) -> None:
    """Replace the value of a key, or remove the key if `change` returns None."""
    with (
        lmdb.open(str(data_file(data).parent), map_size=MAP_BYTES, lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        raw = transaction.get(key)
        assert raw is not None, f"no record {key!r}"
        value = change(bytes(raw))
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, value)


def topic_numbers(data: Path) -> dict[str, int]:
    records = read_records(data, store_keys.TOPICS).values()
    topics = [stored_values.read_topic(raw)[0] for raw in records]
    return {topic.name: topic.number for topic in topics}
