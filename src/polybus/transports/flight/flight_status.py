"""Errors as Flight statuses: the extra info contains the code and the text."""

from __future__ import annotations

import json
from typing import Any

from polybus.errors import Denied, PolybusError, Unavailable
from polybus.kernel import flight_port

INTERNAL = "internal"
# gRPC sends the text three times in HTTP/2 headers, escaped; its clients accept 8 KiB.
MAX_TEXT_BYTES = 768


class Unauthenticated(Exception):
    """Invalid credentials: as `Denied`, with a Flight status of its own."""


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return code and text for a client. Internal errors are only detailed in the log."""
    if isinstance(error, Unauthenticated):
        return {"code": Denied.code, "text": str(error)}
    if isinstance(error, PolybusError):
        return {"code": error.code, "text": str(error)}
    return {"code": INTERNAL, "text": "the bus failed to answer; its log says why"}


def to_flight_status(error: BaseException) -> tuple[int, str, bytes]:
    """Return Flight status code, text and extra info."""
    if isinstance(error, Unauthenticated):
        status = flight_port.UNAUTHENTICATED
    elif isinstance(error, Denied):
        status = flight_port.UNAUTHORIZED
    elif isinstance(error, Unavailable):
        status = flight_port.UNAVAILABLE
    elif isinstance(error, PolybusError):
        status = flight_port.FAILED
    else:
        status = flight_port.INTERNAL
    described = describe_error(error)
    raw = described["text"].encode("utf-8", "replace")
    text = raw[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
    described["text"] = text + "…" if len(raw) > MAX_TEXT_BYTES else text
    return status, described["text"], json.dumps(described).encode()
