"""GSB over TLS: a real nng with TLS as the peer."""

from __future__ import annotations

import pynng
import pytest

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.testing.certificates import write_certificate
from polybus.testing.process import serve

TIMEOUT_MS = 20_000


def asked(socket: pynng.Pair0, **kind: object) -> pb.Packet:
    socket.send(pb.Packet(**kind).SerializeToString())  # type: ignore[arg-type]
    return pb.Packet.FromString(socket.recv())


@pytest.mark.parametrize("size", [1, 900_000])
def test_nng_calls_a_service_through_tls(tmp_path, size):
    certificate, key = write_certificate(tmp_path)
    env = {"POLYBUS_TLS_CERTIFICATE": str(certificate), "POLYBUS_TLS_KEY": str(key)}
    trust = pynng.TLSConfig(
        pynng.TLSConfig.MODE_CLIENT, ca_files=[str(certificate)], server_name="localhost"
    )
    with serve(listen=("gsb=tls+tcp://127.0.0.1:0",), env=env) as bus:
        url = str(bus.address("gsb"))
        with (
            pynng.Pair0(recv_timeout=TIMEOUT_MS, tls_config=trust) as service,
            pynng.Pair0(recv_timeout=TIMEOUT_MS, tls_config=trust) as caller,
        ):
            service.dial(url, block=True)
            caller.dial(url, block=True)
            registered = asked(service, register_request=pb.RegisterRequest(service_id="echo"))
            assert registered.register_reply.code == 0
            call = pb.ServiceCallRequest(address="echo", request_id="1", data=b"x" * size)
            caller.send(pb.Packet(service_call_request=call).SerializeToString())
            request = pb.Packet.FromString(service.recv()).call_request
            reply = pb.CallReply(request_id=request.request_id, data=request.data)
            service.send(pb.Packet(call_reply=reply).SerializeToString())
            answer = pb.Packet.FromString(caller.recv()).call_reply
            assert (answer.request_id, answer.data) == ("1", b"x" * size)
