"""Oracle of request_columns: messages given as tuples, as columns."""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Any

MOST = 2**31 - 1

Columns = tuple[bytes | None, bytes, bytes, bytes, bytes]


def columns_of(
    requests: list[Any], kind: type[tuple[object, ...]], max_key_bytes: int, max_body_bytes: int
) -> Columns | None:
    keys: list[bytes | None] = []
    bodies: list[bytes] = []
    for one in requests:
        if type(one) is not kind or len(one) != 3:
            return None
        key, body, headers = one
        if headers is not None or type(body) is not bytes or len(body) > max_body_bytes:
            return None
        raw = _encoded(key)
        if key is not None and (raw is None or len(raw) > max_key_bytes):
            return None
        keys.append(raw)
        bodies.append(body)
    text, data = b"".join(key or b"" for key in keys), b"".join(bodies)
    if len(text) > MOST or len(data) > MOST:
        return None
    validity = _bitmap(keys) if None in keys else None
    return validity, _offsets([key or b"" for key in keys]), text, _offsets(bodies), data


def _encoded(key: object) -> bytes | None:
    try:
        return key.encode() if type(key) is str else None
    except UnicodeEncodeError:
        return None


def _offsets(parts: list[bytes]) -> bytes:
    ends = list(accumulate(map(len, parts), initial=0))
    return struct.pack(f"<{len(ends)}i", *ends)


def _bitmap(keys: list[bytes | None]) -> bytes:
    bits = sum(1 << at for at, key in enumerate(keys) if key is not None)
    return bits.to_bytes((len(keys) + 7) // 8, "little")
