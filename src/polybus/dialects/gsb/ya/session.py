"""One connection of the deployed framing, for clients of the Golem service bus.

It has the rules of a GSB session: registration, calls, streams, back-pressure, topics. Its packets
differ, and so do these:

- The first packet must be a hello. The bus answers it with its own.
- There is no cancel and there are no credits. The bus does not notify a service that a call has
  ended, and does not read from a service while one of its callers is full.
- A call with `no_reply` gets none. A service of this framing is not expected to answer it.
- A connection with the instance id of an earlier one replaces it, so that a client that reconnects
  gets its names back.
"""

from __future__ import annotations

import secrets
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from polybus import __version__
from polybus.dialects.gsb import codec as gsb_codec
from polybus.dialects.gsb.server.control_requests import CONTROL_KINDS
from polybus.dialects.gsb.server.oversized_packet import OversizedPacket
from polybus.dialects.gsb.server.service_registry import ServiceStatus
from polybus.dialects.gsb.server.session import GsbSession
from polybus.dialects.gsb.service_address import StatusCode
from polybus.dialects.gsb.ya import codec
from polybus.dialects.gsb.ya import ya_pb2 as pb
from polybus.dialects.gsb.ya.ya_address import to_native
from polybus.dialects.gsb.ya.ya_packets import YaEncoding
from polybus.errors import BadFrame, MalformedRequest

if TYPE_CHECKING:
    from polybus.bus.connection import ConnectionIO
    from polybus.dialects.gsb.server.call_table import OpenCall
    from polybus.dialects.gsb.server.session import GsbServer
    from polybus.kernel.framing import Encoding

REPLACED = "replaced"  # by a later connection of the same client; a name of a counter
# The request ids of calls without a reply begin so. Those of clients cannot: they are UTF-8.
NO_REPLY = b"\xff"


class YaServer:
    """State of all connections of this framing. Calling it with a pipe opens a session."""

    def __init__(self, server: GsbServer) -> None:
        self.server = server
        self.encoding = YaEncoding(server.broker.new_encoding_number())
        server.senders.encodings.append(self.encoding)
        instance = secrets.token_bytes(16)
        hello = pb.Hello(name="polybus", version=__version__, instance_id=instance)
        self.hello = codec.frame(pb.Packet(hello=hello))
        # By user and instance id, so that no user can replace connections of another.
        self.sessions: WeakValueDictionary[tuple[str, bytes], YaSession] = WeakValueDictionary()

    def __call__(self, pipe: ConnectionIO) -> YaSession:
        return YaSession(self, pipe)


class YaSession(GsbSession):
    NAME = "gsb+ya"
    LENGTH_BYTES = codec.LENGTH.size

    def __init__(self, ya: YaServer, pipe: ConnectionIO) -> None:
        self._ya = ya
        self._registered_as: dict[str, str] = {}  # by the name here
        self._numbers = count(1)
        super().__init__(ya.server, pipe)

    def _marks_frames(self, pipe: ConnectionIO) -> bool:
        return False

    def _choose_encoding(self, server: GsbServer) -> Encoding:
        return self._ya.encoding

    def _begin(self) -> None:
        self.is_open = True  # the hello is a packet

    # --- packets

    def _begin_oversized(self, size: int) -> OversizedPacket:
        if self.is_first:
            raise BadFrame(codec.NO_HELLO)
        return OversizedPacket(size, self._max_packet_bytes, pb.Packet)

    def receive_packet(self, payload: bytes) -> bool:
        if self.connection.is_closed:
            return True
        packet = gsb_codec.decode_as(pb.Packet, payload)
        kind = packet.WhichOneof("kind")
        if self.is_first:
            if kind != "hello":
                raise BadFrame(codec.NO_HELLO)
            self._greet(packet.hello)
            return True
        match kind:
            case "call_request":
                return self._call(packet.call_request)
            case "call_reply":
                return self._on_reply(packet.call_reply)
            case "ping":
                self.send(codec.frame(pb.Packet(pong=pb.Pong())))
            case "pong":
                pass  # `receive` has noted that the peer is alive
            case "hello":
                raise BadFrame(gsb_codec.SECOND_HELLO)
            case kind if kind in CONTROL_KINDS:
                return self._requests.execute(kind, packet)
            case _:
                raise BadFrame(gsb_codec.WRONG_DIRECTION)
        return True

    def _greet(self, hello: pb.Hello) -> None:
        instance = hello.instance_id
        if len(instance) > codec.MAX_INSTANCE_BYTES:
            raise BadFrame(codec.BAD_HELLO)
        if instance:
            key = (self._pipe.identity.name, instance)
            earlier = self._ya.sessions.get(key)
            if earlier is not None and not earlier.gone:
                earlier.close(REPLACED)
            self._ya.sessions[key] = self
        self._calls.pings.peers[self] = None  # every client of this framing answers pings
        self.send(self._ya.hello)

    def _call(self, request: pb.CallRequest) -> bool:
        request_id, data = request.request_id.encode(), request.data
        if request.no_reply:
            request_id = NO_REPLY + b"%x" % next(self._numbers)
        try:
            address = to_native(request.address).encode()
        except MalformedRequest as error:
            status = ServiceStatus(StatusCode.BAD_REQUEST, str(error))
            self._calls.refuse(self, request_id, request.address.encode(), len(data), status)
            return True
        return self.call(address, request_id, data)

    def _on_reply(self, reply: pb.CallReply) -> bool:
        code, data = StatusCode.OK, reply.data
        if reply.code:
            code, data = StatusCode.FAILURE, codec.decode_failure(reply.code, data)
        return self.reply(reply.request_id.encode(), code, reply.reply_type, data)

    def register(self, service_id: str) -> ServiceStatus:
        try:
            name = to_native(service_id)
        except MalformedRequest as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        status = super().register(name)
        if status.code == StatusCode.OK:
            self._registered_as[name] = service_id
        return status

    def unregister(self, service_id: str) -> ServiceStatus:
        try:
            name = to_native(service_id)
        except MalformedRequest as error:
            return ServiceStatus(StatusCode.NOT_FOUND, str(error))
        status = super().unregister(name)
        if status.code == StatusCode.OK:
            del self._registered_as[name]
        return status

    # --- sending to the peer

    def send_reply(self, request_id: bytes, code: int, kind: int, data: bytes) -> None:
        if request_id.startswith(NO_REPLY):
            return
        if code:
            code, data = codec.encode_failure(data)
        reply = pb.CallReply(request_id=request_id.decode(), data=data)
        reply.code, reply.reply_type = code, kind  # type: ignore[assignment]
        self.send(codec.frame(pb.Packet(call_reply=reply)))

    def send_call(self, call: OpenCall, data: bytes, caller_name: bytes) -> None:
        name = call.service.id
        request = pb.CallRequest(
            caller=caller_name.decode(),
            address=self._registered_as[name] + call.address.decode()[len(name) :],
            request_id=call.id.decode(),
            data=data,
            no_reply=call.request_id.startswith(NO_REPLY),
        )
        self.send(codec.frame(pb.Packet(call_request=request)))
        if request.no_reply:
            self._calls.table.end(call, StatusCode.OK)

    def send_broadcast(self, topic: str, data: bytes, caller: str) -> None:
        message = pb.BroadcastRequest(topic=topic, data=data, caller=caller)
        self.send(codec.frame(pb.Packet(broadcast_request=message)))

    def send_cancel(self, call_id: bytes) -> None:
        """Do nothing: this protocol has no cancel. Later replies are counted and dropped."""

    def send_ping(self) -> None:
        self.send(codec.frame(pb.Packet(ping=pb.Ping())))

    def encode_status(self, kind: str, status: ServiceStatus) -> bytes:
        return codec.frame(codec.status_packet(kind, status.code, status.message))
