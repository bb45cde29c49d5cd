"""GSB without polybus: a service and a caller made of pynng, protobuf and msgpack alone.

    polybus serve
    python examples/gsb_pynng.py [tcp://127.0.0.1:6569]

Any program in any language joins like this: dial a Pair0 socket, and send and receive
packets, one a message. The packets are those of gsb.proto, which is compiled for the
language at hand (`protoc --python_out=. gsb.proto`). Here the few that are needed are
declared by hand, so that this file needs nothing else.

The service answers "countdown/from" with a stream: n, n-1, … 1, slowly, until it is
told to stop. The caller takes a few items of it, and cancels.
"""

import sys
import threading
from typing import Any

import msgpack
import pynng
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ADDRESS = "tcp://127.0.0.1:6569"
SERVICE = "countdown"
FULL, PARTIAL, FAILURE = 0, 1, 500
STEP_S = 0.05

# Message → field → (number, type); a packet holds one of the others.
TEXT, BYTES, NUMBER, MESSAGE = 9, 12, 5, 11
MESSAGES = {
    "RegisterRequest": {"service_id": (1, TEXT)},
    "RegisterReply": {"code": (1, NUMBER), "message": (2, TEXT)},
    "ServiceCallRequest": {"address": (1, TEXT), "request_id": (2, TEXT), "data": (3, BYTES)},
    "CallRequest": {
        "request_id": (1, TEXT),
        "data": (2, BYTES),
        "caller": (3, TEXT),
        "address": (4, TEXT),
    },
    "CallReply": {
        "request_id": (1, TEXT),
        "code": (2, NUMBER),
        "type": (3, NUMBER),
        "data": (4, BYTES),
    },
    "Cancel": {"request_id": (1, TEXT)},
}
PACKET = {
    "register_request": (2, "RegisterRequest"),
    "register_reply": (3, "RegisterReply"),
    "service_call_request": (6, "ServiceCallRequest"),
    "call_reply": (7, "CallReply"),
    "call_request": (16, "CallRequest"),
    "cancel": (17, "Cancel"),
}


def declare() -> Any:
    """The class of packets: what protoc would have made."""
    file = descriptor_pb2.FileDescriptorProto(name="g.proto", package="GSB_API", syntax="proto3")
    for name, fields in MESSAGES.items():
        declared = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            declared.field.add(name=field, number=number, type=kind, label=1)
    packet = file.message_type.add(name="Packet")
    packet.oneof_decl.add(name="kind")
    for field, (number, name) in PACKET.items():
        packet.field.add(
            name=field,
            number=number,
            type=MESSAGE,
            label=1,
            type_name=f".GSB_API.{name}",
            oneof_index=0,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("GSB_API.Packet"))


Packet = declare()


def packet(kind: str, **fields: Any) -> bytes:
    made = Packet()
    getattr(made, kind).SetInParent()
    for name, value in fields.items():
        setattr(getattr(made, kind), name, value)
    written: bytes = made.SerializeToString()
    return written


class Countdown:
    """The service: one socket, one thread that receives, one more for each call."""

    def __init__(self, address: str) -> None:
        self.registered = threading.Event()
        self._cancelled: dict[str, threading.Event] = {}
        self._answering: list[threading.Thread] = []
        self._socket = pynng.Pair0()
        # nng dials again by itself when the bus was restarted, and then nothing is registered.
        self._socket.add_post_pipe_connect_cb(self._register)
        self._socket.dial(address, block=False)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Nothing may use the socket any more when it is closed: nng does not forgive that."""
        for cancelled in list(self._cancelled.values()):
            cancelled.set()
        for thread in self._answering:
            thread.join()
        self._socket.close()
        self._thread.join()

    def _register(self, _pipe: Any) -> None:
        self._socket.send(packet("register_request", service_id=SERVICE))

    def _serve(self) -> None:
        while True:
            try:
                received = Packet.FromString(self._socket.recv())
            except pynng.Closed:
                return
            kind = received.WhichOneof("kind")
            if kind == "register_reply":
                print("registered, code", received.register_reply.code, flush=True)
                self.registered.set()
            elif kind == "call_request":
                call = received.call_request
                self._cancelled[call.request_id] = threading.Event()
                thread = threading.Thread(target=self._count_down, args=(call,))
                self._answering.append(thread)
                thread.start()
            elif kind == "cancel" and received.cancel.request_id in self._cancelled:
                self._cancelled[received.cancel.request_id].set()

    def _count_down(self, call: Any) -> None:
        cancelled = self._cancelled[call.request_id]
        for number in range(msgpack.unpackb(call.data), 0, -1):
            if cancelled.wait(STEP_S):
                print(f"{call.caller} has heard enough of {call.address}", flush=True)
                break
            self._reply(call, PARTIAL, msgpack.packb(number))
        else:
            self._reply(call, FULL, b"")
        del self._cancelled[call.request_id]

    def _reply(self, call: Any, kind: int, data: bytes) -> None:
        self._socket.send(packet("call_reply", request_id=call.request_id, type=kind, data=data))


def call(address: str, request_id: str, start: int, most: int) -> None:
    """Print what comes; after `most` items it is enough."""
    with pynng.Pair0(dial=address) as socket:
        data = msgpack.packb(start)
        where = f"{SERVICE}/from"
        socket.send(packet("service_call_request", address=where, request_id=request_id, data=data))
        taken = 0
        while True:
            reply = Packet.FromString(socket.recv()).call_reply
            if reply.code == FAILURE:
                print("ended:", msgpack.unpackb(reply.data), flush=True)
                return
            if reply.type == FULL:
                print("that was all", flush=True)
                return
            print("item", msgpack.unpackb(reply.data), flush=True)
            taken += 1
            if taken == most:
                socket.send(packet("cancel", request_id=request_id))


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else ADDRESS
    countdown = Countdown(address)
    countdown.registered.wait()
    call(address, "first", start=3, most=100)
    call(address, "second", start=1000, most=3)
    countdown.close()


if __name__ == "__main__":
    main()
