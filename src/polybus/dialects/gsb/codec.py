"""GSB packets: values to bytes and back. No I/O, no clock.

One nng message is one protobuf `Packet` (gsb.proto). Framing on the connection is SP (sp.py).
`data` is msgpack; empty data means no value.

A failure travels as a FULL reply with code 500 and a map {code, message, origin}. A failure of
the bus becomes an error of its own type. A failure of a service is always `ServiceFailed`, with
the service's number in `status`, so a service's 404 is never mistaken for a missing service.

docs/spec/gsb.md has the whole format, with its reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
from google.protobuf.message import DecodeError, Message

from polybus import errors
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.service_address import StatusCode as StatusCode
from polybus.dialects.gsb.sp import TOO_LARGE
from polybus.errors import BadFrame, PolybusError, ServiceFailed
from polybus.model.limits import MIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

P = TypeVar("P", bound=Message)

DEFAULT_MAX_PACKET_BYTES = 16 * MIB

FULL, PARTIAL = 0, 1  # types of a reply

# Reasons for which the bus closes a connection. They are names of counters.
NO_PACKET = "no_packet"  # not a Packet, or one of an unknown kind
WRONG_DIRECTION = "wrong_direction"
BAD_REPLY_TYPE = "bad_reply_type"
BAD_RELAY = "bad_relay"  # a call between nodes with a field out of its range
SECOND_HELLO = "second_hello"  # a hello that is not the first packet
# Kinds that carry data of clients.
LARGE_KINDS = frozenset(
    {
        pb.Packet.SERVICE_CALL_REQUEST_FIELD_NUMBER,
        pb.Packet.CALL_REPLY_FIELD_NUMBER,
        pb.Packet.BROADCAST_REQUEST_FIELD_NUMBER,
        pb.Packet.CALL_REQUEST_FIELD_NUMBER,
        pb.Packet.RELAY_CALL_FIELD_NUMBER,
    }
)
MAX_VARINT_BYTES = 10


class Origin:
    BUS = "bus"
    SERVICE = "service"


# A service may send this many PARTIALs of a call without credit, while the earlier ones hold
# fewer than FREE_BYTES of data. The first PARTIAL is therefore always free.
FREE_PARTIALS = 64
FREE_BYTES = MIB

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


def check_large(payload: memoryview) -> None:
    """Raise `BadFrame` unless a large packet is one of a kind that carries data of clients.

    Lists of small messages take much more memory decoded than on the wire.
    """
    tag, at = read_varint(payload, 0)
    size, at = read_varint(payload, at) if at is not None else (0, None)
    if at is None:
        raise BadFrame(NO_PACKET)
    # One field alone: protobuf merges several, and the others could be of any kind.
    if tag & 7 != 2 or tag >> 3 not in LARGE_KINDS or at + size != len(payload):
        raise BadFrame(TOO_LARGE)


def read_varint(data: bytearray | memoryview, at: int) -> tuple[int, int | None]:
    """Return a number and the place after it, which is None if the number is incomplete.

    Raises `BadFrame` if it is too long.
    """
    value = 0
    for place in range(at, len(data)):
        if place - at >= MAX_VARINT_BYTES:
            raise BadFrame(NO_PACKET)
        value |= (data[place] & 0x7F) << (7 * (place - at))
        if data[place] < 0x80:
            return value, place + 1
    return 0, None


def decode_packet(payload: bytes) -> pb.Packet:
    """Return the packet of a payload. Raises `BadFrame` if it is not one."""
    return decode_as(pb.Packet, payload)


def decode_as(packet_type: type[P], payload: bytes) -> P:
    """Return a packet of this type. Raises `BadFrame` if it is not one, or of an unknown kind."""
    try:
        packet = packet_type.FromString(payload)
    except DecodeError:
        raise BadFrame(NO_PACKET) from None
    if packet.WhichOneof("kind") is None:
        raise BadFrame(NO_PACKET)
    return packet


def begin_status(packet: Message, kind: str) -> Any:
    """Make a packet the reply to a request of this kind, which has no id. Returns that reply."""
    reply: Any = getattr(packet, kind.replace("_request", "_reply"))
    reply.SetInParent()  # else a reply without code and message would have no kind
    return reply


def pack(value: Any) -> bytes:
    """Return a value as `data`."""
    return b"" if value is None else msgpack.packb(value)


def unpack(data: bytes) -> Any:
    """Return the value of `data`. Raises ValueError if it is not msgpack."""
    return msgpack.unpackb(data, strict_map_key=False) if data else None


# --- failures


def pack_failure(code: int, message: str, origin: str) -> bytes:
    return pack({"code": int(code), "message": message, "origin": origin})


def error_from_reply(data: Buffer, address: str) -> PolybusError:
    """Return the error for a reply with code 500. Data of any other form is a service failure."""
    try:
        failure = unpack(bytes(data))
    except ValueError:
        failure = bytes(data)
    if not isinstance(failure, dict):
        return ServiceFailed(f"{address}: the service failed", data=failure)
    code, message = failure.get("code"), failure.get("message")
    status = code if isinstance(code, int) else int(StatusCode.FAILURE)
    text = f"{address}: {message or 'the service failed'}"
    if failure.get("origin") == Origin.BUS and status in BUS_ERRORS:
        return BUS_ERRORS[status](text)
    return ServiceFailed(text, status, failure)


def error_from_status(code: int, message: str, action: str) -> PolybusError:
    """Return the error for a refused request without an id, such as register or subscribe."""
    kind = BUS_ERRORS.get(code, errors.Refused)
    return kind(f"{action}: {message or f'refused with code {code}'}")
