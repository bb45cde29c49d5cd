"""GSB with the rest of the bus: TLS, rules, the call log, topics of other dialects."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path

import pynng
import pytest

from polybus import freud, gsb
from polybus.errors import Denied
from polybus.testing.bus_process import BusProcess, serve
from tests.rig.certificates import trusting, write_certificate
from tests.rig.gsb_peer import call, connect, packet, partial
from tests.rig.gsb_wire import read_failure
from tests.rig.observer import check_unharmed, stats, until

TIMEOUT_MS = 20_000


def test_client_and_nng_connect_over_tls(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    env = {"POLYBUS_TLS_CERTIFICATE": str(certificate), "POLYBUS_TLS_KEY": str(key)}
    with serve("--engine", "memory:", listen=("gsb=tls+tcp://localhost:0",), env=env) as bus:
        address = str(bus.address("gsb"))
        with gsb.blocking.connect(address, tls=trusting(certificate)) as client:
            assert client.call("sys/ping", {"a": bytes(300_000)}) == {"a": bytes(300_000)}
        with pytest.raises(Exception, match="certificate verify failed"):
            gsb.blocking.connect(address).open()
        config = pynng.TLSConfig(
            pynng.TLSConfig.MODE_CLIENT,
            server_name="localhost",
            ca_string=certificate.read_text(),
            auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED,
        )
        with pynng.Pair0(tls_config=config, recv_timeout=TIMEOUT_MS) as socket:
            socket.dial(address, block=True)
            socket.send(packet("ping", token=b"hidden"))
            assert b"hidden" in socket.recv()
        check_hangup_of_a_halted_service(bus, trusting(certificate))
        check_unharmed(bus)


def check_hangup_of_a_halted_service(bus: BusProcess, tls: ssl.SSLContext) -> None:
    address = bus.address("gsb")
    with connect(address, tls=tls, small=True) as caller, connect(address, tls=tls) as successor:
        with connect(address, tls=tls) as service:
            service.register("many")
            caller.send(call("many", "1"))
            request = service.call()
            sent = 0
            while stats(bus)["gsb"]["waiting"] == 0:  # later items stay in the socket buffers
                for _ in range(8):
                    service.send(partial(request.request_id, bytes(64 * 1024)))
                    sent += 1
        until(lambda: successor.register("many") == 0, "the name is released")
        items = 0
        while (last := caller.reply()).type == 1:
            items += 1
        assert read_failure(last.data).code == 503
        assert items == sent


def test_calls_are_logged_and_topics_are_shared_with_freud(tmp_path: Path) -> None:
    listen = ("gsb=tcp://127.0.0.1:0", "native=grpc://127.0.0.1:0", f"freud=unix:{tmp_path}/f.sock")
    env = {"POLYBUS_GSB_AUDIT": "true", "POLYBUS_ACL": "deny everyone call secret"}
    with serve(listen=listen, env=env) as bus:
        check_broadcasts_reach_freud_and_back(bus)
        with gsb.blocking.connect(str(bus.address("gsb"))) as client:

            @client.service("numbers")
            def numbers(call: gsb.Call) -> object:
                yield from range(call.data)

            @client.service("secret")
            def secret(call: gsb.Call) -> None: ...

            assert list(client.stream("numbers", 5)) == [0, 1, 2, 3, 4]
            with pytest.raises(Denied):
                client.call("secret")
        url = f"polybus://127.0.0.1:{bus.address('native').port}"
        check_durable_broadcasts_have_their_sender(bus, url)
        printed: list[dict[str, object]] = []
        while len(printed) < 2:
            done = bus.run("sub", "gsb.calls", "-o", "earliest", "-n", "2", "--bus", url)
            assert done.returncode == 0, done
            printed = [json.loads(line) for line in done.stdout.splitlines()]
        first, second = printed
        assert (first["service"], first["code"], first["replies"]) == ("numbers", 0, 6)
        assert str(first["caller"]).startswith("local:")
        assert {"at_ms", "request_bytes", "reply_bytes", "duration_ms"} <= set(first)
        assert (second["address"], second["code"]) == ("secret", 403)


def check_durable_broadcasts_have_their_sender(bus: BusProcess, url: str) -> None:
    async def main(address: str) -> None:
        async with gsb.connect(address) as sender, gsb.connect(address) as reader:
            subscription = await reader.subscribe("kept")
            await asyncio.gather(*(sender.broadcast("kept", n) for n in range(200)))
            messages = [await subscription.get(20) for _ in range(200)]
            assert {m.caller for m in messages if m is not None} == {f"local:{os.getuid()}"}
            assert sorted(m.data for m in messages if m is not None) == list(range(200))

    assert bus.run("topic", "create", "kept", "--bus", url).returncode == 0
    asyncio.run(main(str(bus.address("gsb"))))


def check_broadcasts_reach_freud_and_back(bus: BusProcess) -> None:
    async def main(gsb_at: str, freud_at: str) -> None:
        async with gsb.connect(gsb_at) as ours, freud.connect(freud_at) as other:
            await other.create_topic("both")
            gsb_reader, freud_reader = await ours.subscribe("both"), await other.subscribe("both")
            await ours.broadcast("both", body=b"from gsb")
            await other.produce("both", b"from freud")
            for _ in range(2):
                pushed, pulled = await gsb_reader.get(20), await freud_reader.get(20)
                assert pushed is not None
                assert pulled is not None
                assert pushed.body == pulled.body
            await freud_reader.unsubscribe()

    asyncio.run(main(str(bus.address("gsb")), str(bus.address("freud"))))
