"""What a pirate client is called: 1 to 64 bytes, on the wire as they are.

People see text: printable UTF-8 without spaces as it is, anything else as `hex:` and its
bytes. Text that begins with `hex:` is always read as bytes, so the two never mix.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Final

from polybus.errors import UsageError

MAX_ID_BYTES: Final = 64
RANDOM_ID_BYTES: Final = 16
HEX: Final = "hex:"


def random_id() -> bytes:
    """As many bytes as no two clients will ever share."""
    return os.urandom(RANDOM_ID_BYTES)


def fingerprint(public_key: bytes) -> bytes:
    """The id of whoever holds this CURVE key (its 32 raw bytes)."""
    return sha256(public_key).digest()[:RANDOM_ID_BYTES]


def check_client_id(client_id: bytes) -> bytes:
    if not 1 <= len(client_id) <= MAX_ID_BYTES:
        raise UsageError(f"a client's id has 1 to {MAX_ID_BYTES} bytes, not {len(client_id)}")
    return client_id


def format_client_id(client_id: bytes) -> str:
    """For people; `parsed` gives the bytes back."""
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
        raise UsageError(f"{text!r} is no client's id: after {HEX} come hex digits") from None
