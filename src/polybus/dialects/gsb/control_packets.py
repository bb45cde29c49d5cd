"""What the bus sends, as frames: the short packets, which are not worth a kernel."""

from __future__ import annotations

from typing import Any

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.server.gsb_packets import frame


def cancel(ipc: bool, call_id: bytes) -> bytes:
    return frame(ipc, _packet(cancel=pb.Cancel(request_id=call_id.decode())))


def credit(ipc: bool, call_id: bytes, replies: int) -> bytes:
    return frame(ipc, _packet(credit=pb.Credit(request_id=call_id.decode(), replies=replies)))


def ping(ipc: bool, token: bytes) -> bytes:
    return frame(ipc, _packet(ping=pb.Ping(token=token)))


def pong(ipc: bool, token: bytes) -> bytes:
    return frame(ipc, _packet(pong=pb.Pong(token=token)))


def reply(ipc: bool, request: str, code: int, message: str) -> bytes:
    """The answer to a request of this kind that has no id."""
    packet = pb.Packet()
    answer: Any = getattr(packet, request.replace("_request", "_reply"))
    answer.SetInParent()  # though code 0 without a message takes no bytes
    answer.code = code
    answer.message = message
    return frame(ipc, packet.SerializeToString())


def _packet(
    *,
    cancel: pb.Cancel | None = None,
    credit: pb.Credit | None = None,
    ping: pb.Ping | None = None,
    pong: pb.Pong | None = None,
) -> bytes:
    return pb.Packet(cancel=cancel, credit=credit, ping=ping, pong=pong).SerializeToString()
