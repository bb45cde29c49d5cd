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
    told = describe_error(error)
    told["text"] = _truncate(told["text"])
    return _kind(error), told["text"], json.dumps(told).encode()


def _truncate(text: str) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= MAX_TEXT_BYTES:
        return raw.decode()
    return raw[:MAX_TEXT_BYTES].decode("utf-8", "ignore") + "…"


def _kind(error: BaseException) -> int:
    if isinstance(error, Unauthenticated):
        return flight_port.UNAUTHENTICATED
    if isinstance(error, Denied):
        return flight_port.UNAUTHORIZED
    if isinstance(error, Unavailable):
        return flight_port.UNAVAILABLE
    return flight_port.FAILED if isinstance(error, PolybusError) else flight_port.INTERNAL
