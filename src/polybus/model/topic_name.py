"""Topic names that all dialects accept.

rqueue may use any 1 to 255 bytes, but only names that pass `check_topic_name` are visible to
other dialects; names that start with `_` belong to the bus and are never shared.
"""

from __future__ import annotations

import unicodedata

from polybus.errors import InvalidTopic

MAX_NAME_BYTES = 255  # rqueue has one byte for the length, so this bounds all dialects
PROBE_PREFIX = b"_probe/"  # private topics on which a client waits for its own echo
PROBE_RANDOM_BYTES = 16  # enough that two clients never collide
DEAD_LETTER_SUFFIX = ".dlq"  # `orders.dlq` has the dead letters of `orders`
_SUFFIX = DEAD_LETTER_SUFFIX.encode()


def check_topic_name(name: object) -> bytes:
    """Return the name as bytes. Raises InvalidTopic with the broken rule."""
    if not isinstance(name, str):
        raise InvalidTopic(f"a topic's name is text, not {type(name).__name__}")
    raw = name.encode("utf-8", errors="surrogatepass")
    problem = _problem(name, raw)
    if problem:
        raise InvalidTopic(f"topic name {name!r} {problem}")
    return raw


def is_shared(raw: bytes) -> bool:
    """Return whether other dialects may see a topic of this name."""
    try:
        return _problem(raw.decode("utf-8"), raw) is None
    except UnicodeDecodeError:
        return False


def is_probe(raw: bytes) -> bool:
    """Return whether this is a client's private probe topic, exempt from policy and limits."""
    return raw.startswith(PROBE_PREFIX) and len(raw) == len(PROBE_PREFIX) + PROBE_RANDOM_BYTES


def dead_letter_source(raw: bytes) -> bytes | None:
    """Return the topic whose dead letters a topic of this name has; None for any other name.

    `a.dlq` and `a.dlq.dlq` have those of `a`. The bus never writes the second, but a client
    might, and it must not be less protected than the first.
    """
    source = raw
    while source.endswith(_SUFFIX):
        source = source[: -len(_SUFFIX)]
    return source if source and source != raw else None


def _problem(name: str, raw: bytes) -> str | None:
    if not raw:
        return "is empty"
    if len(raw) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    if name.startswith("_"):
        return "starts with '_', which is kept for the bus"
    if "," in name or "*" in name:
        return "contains ',' or '*'"
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        return "contains a control character"
    return None
