"""Our errors as Flight's: the class says the kind, `extra_info` carries code and text."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.flight as flight

from polybus.errors import (
    Denied,
    PolybusError,
    Unavailable,
)

INTERNAL = "internal"


def as_json(error: BaseException) -> dict[str, Any]:
    """What a client is told. A fault of ours says so, and the log says what it was."""
    if isinstance(error, PolybusError):
        return {"code": error.code, "text": str(error)}
    return {"code": INTERNAL, "text": "the bus failed to answer; its log says why"}


def as_flight(error: BaseException) -> flight.FlightError:
    told = as_json(error)
    kind = flight.FlightServerError
    if isinstance(error, Denied):
        kind = flight.FlightUnauthorizedError
    elif isinstance(error, Unavailable):
        kind = flight.FlightUnavailableError
    elif told["code"] == INTERNAL:
        kind = flight.FlightInternalError
    return kind(told["text"], extra_info=json.dumps(told).encode())


def unauthenticated(text: str) -> flight.FlightError:
    told = {"code": Denied.code, "text": text}
    return flight.FlightUnauthenticatedError(text, extra_info=json.dumps(told).encode())
