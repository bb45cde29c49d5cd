"""Client ids: 1 to 64 bytes.

As text, printable UTF-8 without spaces is shown as it is, and any other id as `hex:` and its
bytes. Text that begins with `hex:` is always parsed as bytes, so the two forms never mix.
"""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import sha256
from typing import Final

from polybus.errors import UsageError

MAX_ID_BYTES: Final = 64
RANDOM_ID_BYTES: Final = 16
HEX: Final = "hex:"
KNOWN_KEYS: Final = 4096  # cached fingerprints, some 200 bytes each


def random_id() -> bytes:
    """Return an id that no two clients share."""
    return os.urandom(RANDOM_ID_BYTES)


@lru_cache(KNOWN_KEYS)
def fingerprint(public_key: bytes) -> bytes:
    """Return the id of the client with this CURVE key (32 raw bytes)."""
    return sha256(public_key).digest()[:RANDOM_ID_BYTES]


def check_client_id(client_id: bytes) -> bytes:
    """Return the id. Raises `UsageError` if its length is not allowed."""
    if not 1 <= len(client_id) <= MAX_ID_BYTES:
        raise UsageError(f"a client id must have 1 to {MAX_ID_BYTES} bytes, got {len(client_id)}")
    return client_id


def format_client_id(client_id: bytes) -> str:
    """Return an id as text. `parse_client_id` is the inverse."""
    try:
        text = client_id.decode("utf-8")
    except UnicodeDecodeError:
        return HEX + client_id.hex()
    plain = text.isprintable() and not any(map(str.isspace, text)) and not text.startswith(HEX)
    return text if plain else HEX + client_id.hex()


def parse_client_id(text: str) -> bytes:
    if not text.startswith(HEX):
        return check_client_id(text.encode("utf-8", "surrogateescape"))
    try:
        return check_client_id(bytes.fromhex(text.removeprefix(HEX)))
    except ValueError:
        raise UsageError(
            f"invalid client id {text!r}: {HEX} must be followed by hex digits"
        ) from None
