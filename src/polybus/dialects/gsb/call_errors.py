"""Failures: as codes on the wire, as errors in Python.

What the bus says becomes an error of its own type; what a service says is always
`ServiceFailed`, with the service's number in `status`. So a 404 of a service is
never taken for a service that is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus import errors
from polybus.dialects.gsb import codec
from polybus.dialects.gsb.codec import Origin, StatusCode
from polybus.errors import PolybusError, ServiceFailed

if TYPE_CHECKING:
    from typing_extensions import Buffer

BUS_ERRORS: dict[int, type[PolybusError]] = {
    StatusCode.BAD_REQUEST: errors.MalformedRequest,
    StatusCode.DENIED: errors.Denied,
    StatusCode.NOT_FOUND: errors.DoesNotExist,
    StatusCode.CONFLICT: errors.Conflict,
    StatusCode.TOO_LARGE: errors.TooLarge,
    StatusCode.CANCELLED: errors.CallCancelled,
    StatusCode.UNAVAILABLE: errors.ServiceGone,
    StatusCode.DEADLINE: errors.DeadlinePassed,
}


def error_from_reply(data: Buffer, address: str) -> PolybusError:
    """The error that a reply with code 500 is."""
    try:
        said = codec.unpack(bytes(data))
    except ValueError:
        said = bytes(data)
    if not isinstance(said, dict):
        return ServiceFailed(f"{address}: the service failed", data=said)
    code, message = said.get("code"), said.get("message")
    status = code if isinstance(code, int) else int(StatusCode.FAILURE)
    text = f"{address}: {message or 'the service failed'}"
    if said.get("origin") == Origin.BUS and status in BUS_ERRORS:
        return BUS_ERRORS[status](text)
    return ServiceFailed(text, status, said)


def error_from_status(code: int, message: str, what: str) -> PolybusError:
    """The error that a reply to register, subscribe and the like is."""
    kind = BUS_ERRORS.get(code, errors.Refused)
    return kind(f"{what}: {message or f'refused with code {code}'}")


def failure_payload(error: BaseException) -> bytes:
    """What a service's caller is told when its handler raised this."""
    if isinstance(error, ServiceFailed):
        return codec.pack_failure(error.status, str(error), Origin.SERVICE)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return codec.pack_failure(StatusCode.FAILURE, text, Origin.SERVICE)
