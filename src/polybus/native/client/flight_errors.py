"""What goes wrong on the way, as the errors of polybus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from polybus.errors import (
    ConnectionLost,
    Denied,
    MalformedRequest,
    NotConnected,
    PeerError,
    PolybusError,
    TooLarge,
    error_from_code,
)

# gRPC tells only by words whether a connection was ever there.
CONNECT_FAILURES = ("failed to connect", "connection refused", "connect failed", "name resolution")


def decode_error(error: dict[str, Any]) -> PolybusError:
    """An error that the bus has answered with."""
    return error_from_code(str(error.get("code", "")), str(error.get("text", "")))


def translate_error(error: BaseException, url: str) -> PolybusError:
    """The error behind one of Flight's."""
    info = getattr(error, "extra_info", None)
    if info:
        try:
            return decode_error(json.loads(info))
        except (ValueError, AttributeError):
            return PeerError(f"{url} answered what is no error of polybus: {error}")
    text = str(error)
    if isinstance(error, flight.FlightUnavailableError):
        return _unreachable(text, url)
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return Denied(text)
    if isinstance(error, flight.FlightCancelledError | flight.FlightTimedOutError):
        return ConnectionLost(f"{url}: the call was ended")
    if "larger than max" in text:
        return TooLarge(text)
    if isinstance(error, pa.ArrowInvalid | pa.ArrowTypeError):
        return MalformedRequest(text)
    return ConnectionLost(f"{url}: {text.splitlines()[0] if text else type(error).__name__}")


def _unreachable(text: str, url: str) -> PolybusError:
    if any(words in text.lower() for words in CONNECT_FAILURES):
        return NotConnected(f"no bus answers at {url}: start one with `polybus serve`")
    return ConnectionLost(f"the connection to {url} has ended")


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise translate_error(error, url) from None
