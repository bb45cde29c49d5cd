"""GSB's packets: values to bytes and back. No I/O, no clock.

One nng message is one protobuf `Packet` (gsb.proto). What a connection carries around
it is SP (sp.py). `data` is msgpack; empty means no value.

A failure travels as a FULL reply with code 500 and a map {code, message, origin}.
The whole format, with its reasons, is docs/spec/gsb.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
from google.protobuf.message import DecodeError

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.service_address import StatusCode as StatusCode
from polybus.errors import BadFrame
from polybus.model.limits import MIB

DEFAULT_MAX_PACKET_BYTES = 16 * MIB

# Reasons for which a connection is closed, as the counters name them.
NO_PACKET = "no_packet"  # bytes that are no Packet, or one without a kind we know
WRONG_DIRECTION = "wrong_direction"
BAD_REPLY_TYPE = "bad_reply_type"
SECOND_HELLO = "second_hello"  # or one that is not the first packet


class Origin:
    BUS = "bus"
    SERVICE = "service"


class Failure(NamedTuple):
    code: int
    message: str
    origin: str


# What a service may send of a call before it has any credit: so many PARTIALs, as long
# as those before hold fewer bytes of data than this. (So the first is always free.)
FREE_PARTIALS = 64
FREE_BYTES = MIB

FROM_CLIENTS = frozenset(
    {
        "hello",
        "register_request",
        "unregister_request",
        "service_call_request",
        "call_reply",
        "subscribe_request",
        "unsubscribe_request",
        "broadcast_request",
        "ping",
        "pong",
        "cancel",
    }
)


def packet(payload: bytes) -> pb.Packet:
    """The packet that a payload is. `BadFrame` if it is none."""
    try:
        found = pb.Packet.FromString(payload)
    except DecodeError:
        raise BadFrame(NO_PACKET) from None
    if found.WhichOneof("kind") is None:
        raise BadFrame(NO_PACKET)
    return found


def pack(value: Any) -> bytes:
    """A value as `data`."""
    return b"" if value is None else msgpack.packb(value)


def unpack(data: bytes) -> Any:
    """The value of `data`; ValueError (or a kind of it) if it is not msgpack."""
    return msgpack.unpackb(data, strict_map_key=False) if data else None


def pack_failure(code: int, message: str, origin: str) -> bytes:
    return pack({"code": int(code), "message": message, "origin": origin})


def read_failure(data: bytes) -> Failure:
    """What a reply with code 500 says; one that keeps to no rule is still a failure."""
    try:
        found = unpack(data)
        return Failure(int(found["code"]), str(found["message"]), str(found["origin"]))
    except Exception:
        return Failure(StatusCode.FAILURE, "the service failed", Origin.SERVICE)
