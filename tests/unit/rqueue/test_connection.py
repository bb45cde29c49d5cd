"""Connections that fail, end and are replaced, and the errors that the client raises."""

from __future__ import annotations

import asyncio
import datetime
import random
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from polybus import rqueue
from polybus.dialects.rqueue.client.rqueue_connection import RqueueReconnector
from polybus.errors import AddressError, BadFrame, ConnectionLost, NotConnected
from polybus.model.address import Address
from polybus.model.limits import MIB
from tests.rig.fake_server import listening
from tests.rig.free_port import free_port
from tests.rig.oracle.rqueue_server import OracleServer
from tests.unit.rqueue.polling import contents, receive, until


async def all_others_done() -> None:
    """Wait until the tasks that served connections have ended, and their sockets are closed."""
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    await asyncio.sleep(0)


class TestConnecting:
    async def test_closed_port_raises_at_once(self):
        address = f"tcp://127.0.0.1:{free_port()}"
        with pytest.raises(NotConnected, match=address):
            await rqueue.connect(address).open()

    async def test_missing_socket_file_raises_at_once(self, tmp_path):
        with pytest.raises(NotConnected, match=r"none\.sock"):
            await rqueue.connect(f"unix:{tmp_path}/none.sock").open()

    async def test_server_without_probes_is_used_with_a_warning(self, topic, caplog):
        async with listening(ServerWithoutProbes().serve) as address:
            async with rqueue.connect(address, connect_timeout_s=1.0) as client:
                await round_trip(client, topic)
                await client.flush()
                await client.deregister()
            assert "did not return a probe within 0.5 s" in caplog.text

    async def test_server_that_executes_frames_in_any_order_is_used(self, topic, caplog):
        server = DisorderlyServer()
        async with listening(server.serve) as address:
            async with rqueue.connect(address) as client:
                await round_trip(client, topic)
                await client.deregister()
                await client.flush()
            assert server.probes_lost > 0
            assert caplog.text == ""

    async def test_late_echo_confirms_again(self, topic):
        server = ServerWithoutProbes()
        async with (
            listening(server.serve) as address,
            rqueue.connect(address, connect_timeout_s=1.0) as client,
        ):
            connection = client._reconnector.connection
            assert connection is not None
            assert not connection.has_echoes
            server.has_probes = True
            await client.deregister()  # subscribes to the probe topic again
            await client.subscribe(topic)
            await until(lambda: connection.has_echoes)
            await client.flush()

    async def test_server_of_another_protocol_raises_bad_frame(self):
        async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()

        async with listening(web) as address:
            with pytest.raises(BadFrame, match="payload_too_large"):
                await rqueue.connect(address).open()

    async def test_server_that_closes_at_once_raises_not_connected(self):
        async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with listening(rude) as address:
            with pytest.raises(NotConnected, match="closed the connection"):
                await rqueue.connect(address).open()

    @pytest.mark.parametrize("address", ["http://127.0.0.1:1", "ipc:///tmp/x"])
    async def test_other_address_schemes_are_rejected(self, address):
        with pytest.raises(AddressError, match="tcp://"):
            await rqueue.connect(address).open()

    async def test_invalid_address_is_rejected_before_connecting(self):
        with pytest.raises(AddressError):
            rqueue.connect("127.0.0.1")


class ServerWithoutProbes(OracleServer):
    """A server that does not relay topics that begin with an underscore."""

    has_probes = False

    async def _obey(self, writer: asyncio.StreamWriter, kind: int, payload: bytes) -> None:
        if self.has_probes or b"_probe/" not in payload:
            await super()._obey(writer, kind, payload)


class DisorderlyServer(OracleServer):
    """A server that executes every SUBSCRIBE after the PUBLISH that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.probes_lost = 0
        self._delayed: list[bytes] = []

    async def _obey(self, writer: asyncio.StreamWriter, kind: int, payload: bytes) -> None:
        if kind == 1:
            self._delayed.append(payload)
            return
        if kind == 0 and b"_probe/" in payload and self._delayed:
            self.probes_lost += not any(self.subscribers.values())
        await super()._obey(writer, kind, payload)
        if kind == 0:
            for subscription in self._delayed:
                await super()._obey(writer, 1, subscription)
            self._delayed.clear()


class TestOtherRoads:
    async def test_client_connects_over_a_unix_socket(self, tmp_path, topic):
        path = tmp_path / "bus.sock"
        server = await asyncio.start_unix_server(OracleServer().serve, path)
        async with rqueue.connect(f"unix:{path}") as client:
            await round_trip(client, topic)
        server.close()
        await all_others_done()

    async def test_client_connects_over_tls_and_checks_the_certificate(self, tmp_path, topic):
        inside, outside = certificate(tmp_path)
        server = await asyncio.start_server(OracleServer().serve, "127.0.0.1", 0, ssl=inside)
        address = f"tls://localhost:{server.sockets[0].getsockname()[1]}"
        async with rqueue.connect(address, tls=outside) as client:
            await round_trip(client, topic)
        with pytest.raises(NotConnected, match="certificate"):
            await rqueue.connect(address).open()
        server.close()
        await all_others_done()


async def round_trip(client: rqueue.Client, topic: str) -> None:
    await client.subscribe(topic)
    large = bytes(300_000)
    publishing = asyncio.create_task(client.publish_many(topic, [b"small", large]))
    assert await contents(client, 2) == [b"small", large]
    await publishing


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a fresh certificate, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(cert_file, key_file)
    return inside, ssl.create_default_context(cafile=str(cert_file))


class TestReconnecting:
    async def test_reconnect_restores_all_subscriptions(self, start, topic):
        bus = start()
        address = bus.address()
        async with (
            rqueue.connect(str(address), backoff_max_s=0.1) as reader,
            rqueue.connect(str(address), backoff_max_s=0.1) as writer,
        ):
            await reader.subscribe(topic, topic + "2", topic + "3")
            await reader.remove(topic + "3")
            bus.close()
            await until(lambda: not reader.is_connected and not writer.is_connected)
            start(port=address.port)
            await until(lambda: reader.is_connected and writer.is_connected)
            for name in (topic + "3", topic, topic + "2"):
                await writer.publish(name, name.encode())
            got = await contents(reader, 2)
            assert got == [topic.encode(), (topic + "2").encode()]
            assert (reader.reconnects, writer.reconnects) == (1, 1)
            assert reader.last_loss is not None

    async def test_publish_while_disconnected_is_sent_after_the_subscriptions(self, start, topic):
        bus = start()
        address = bus.address()
        async with rqueue.connect(str(address), backoff_max_s=0.1) as client:
            await client.subscribe(topic)
            bus.close()
            await until(lambda: not client.is_connected)
            waiting = [
                asyncio.create_task(client.publish(topic, b"%d" % number)) for number in range(3)
            ]
            await asyncio.sleep(0)
            start(port=address.port)
            assert await contents(client, 3) == [b"0", b"1", b"2"]
            await asyncio.gather(*waiting)

    async def test_subscribe_while_disconnected_is_active_after_the_reconnect(self, start, topic):
        bus = start()
        address = bus.address()
        async with rqueue.connect(str(address), backoff_max_s=0.1) as client:
            bus.close()
            await until(lambda: not client.is_connected)
            subscribing = asyncio.create_task(client.subscribe(topic))
            await asyncio.sleep(0)
            start(port=address.port)
            await subscribing
            await client.publish(topic, b"x")
            assert await contents(client, 1) == [b"x"]

    async def test_waiting_for_a_reconnect_is_bounded(self, start, topic):
        bus = start()
        async with rqueue.connect(str(bus.address()), wait_timeout_s=0.05) as client:
            bus.close()
            await until(lambda: not client.is_connected)
            for call in (client.publish(topic, b"x"), client.subscribe(topic)):
                with pytest.raises(NotConnected, match=r"0\.05 s"):
                    await call

    async def test_without_reconnect_the_reader_gets_its_messages_then_an_error(self, start, topic):
        bus = start()
        async with rqueue.connect(str(bus.address()), reconnect=False) as client:
            await client.subscribe(topic)
            await client.publish_many(topic, [b"a", b"b"])
            await client.flush()
            bus.close()
            assert await contents(client, 2) == [b"a", b"b"]
            with pytest.raises(ConnectionLost):
                await receive(client, 1)
            with pytest.raises(ConnectionLost):
                await client.publish(topic, b"x")
            with pytest.raises(ConnectionLost):
                await client.subscribe(topic)
            assert client.reconnects == 0

    async def test_close_while_disconnected_raises_nothing(self, start):
        bus = start()
        async with rqueue.connect(str(bus.address())) as client:
            bus.close()
            await until(lambda: not client.is_connected)

    async def test_client_reconnects_after_each_restart(self, start, topic):
        bus = start()
        address = bus.address()
        async with rqueue.connect(str(address), backoff_max_s=0.1) as client:
            await client.subscribe(topic)
            for number in range(2):
                bus.close()
                await until(lambda: not client.is_connected)
                bus = start(port=address.port)
                await client.publish(topic, b"%d" % number)
                assert await contents(client, 1) == [b"%d" % number]
            assert client.reconnects == 2

    async def test_backoff_grows_while_the_server_closes_each_connection(self, monkeypatch):
        oracle = OracleServer()
        attempts: list[int] = []

        async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Answers the handshake, then hangs up."""
            for _ in ("subscribe", "publish"):
                await oracle._obey(writer, *await oracle._read_frame(reader))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        def no_wait(line: RqueueReconnector, attempt: int) -> float:
            attempts.append(attempt)
            return 0

        monkeypatch.setattr(RqueueReconnector, "_backoff_s", no_wait)
        async with listening(short) as address, rqueue.connect(address):
            await until(lambda: len(attempts) >= 5)
        assert attempts[:5] == [1, 2, 3, 4, 5]

    async def test_backoff_doubles_up_to_a_bound_with_jitter(self):
        options = rqueue.ClientOptions(backoff_first_s=0.1, backoff_max_s=3)
        line = RqueueReconnector(Address.parse("tcp://x:1"), options, print, print, print)
        random.seed(1)
        for attempt, longest in ((0, 0.1), (1, 0.2), (4, 1.6), (5, 3), (10_000, 3)):
            waits = [line._backoff_s(attempt) for _ in range(200)]
            assert longest / 2 <= min(waits) < max(waits) <= longest
            assert max(waits) - min(waits) > longest / 4


class TestTelling:
    """Faults of the server that the caller must see."""

    async def test_publish_over_the_servers_limit_raises_at_the_next_flush(self, address, topic):
        async with rqueue.connect(address, max_payload=8192) as client:
            await client.publish(topic, bytes(4000))
            with pytest.raises(ConnectionLost, match="max-payload"):
                await client.flush()
            await until(lambda: client.is_connected)
            assert client.reconnects == 1
            await client.publish(topic, b"fits")
            await client.flush()

    async def test_publish_over_the_servers_limit_raises_at_close(self, address, topic):
        client = rqueue.connect(address, max_payload=8192)
        await client.open()
        await client.publish(topic, bytes(4000))
        with pytest.raises(ConnectionLost, match="may be lost"):
            await client.close()
        assert not client.is_connected

    async def test_publish_over_the_servers_limit_raises_in_the_reader_without_reconnect(
        self, address, topic
    ):
        client = rqueue.connect(address, max_payload=8192, reconnect=False)
        await client.open()
        await client.publish(topic, bytes(4000))
        with pytest.raises(ConnectionLost, match="max-payload"):
            await receive(client, 1)
        with pytest.raises(ConnectionLost):
            await client.close()

    async def test_subscribe_survives_a_lost_connection(self, address, topic):
        async with rqueue.connect(address, max_payload=8192) as client:
            (await client._reconnector.wait_connected()).write(b"\0\0\0\0\xff")
            await client.subscribe(topic)
            assert client.reconnects == 1
            await client.publish(topic, b"x")
            assert await contents(client, 1) == [b"x"]

    async def test_subscribe_over_the_servers_limit_changes_no_subscription(self, topic):
        oracle = OracleServer()

        async def narrow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Close a connection that subscribes to more than two topics, the probe included."""
            try:
                while sum(writer in members for members in oracle.subscribers.values()) <= 2:
                    await oracle._obey(writer, *await oracle._read_frame(reader))
            finally:
                oracle._deregister(writer)

        async with (
            listening(narrow) as address,
            rqueue.connect(address, backoff_first_s=0.001) as client,
        ):
            await client.subscribe(topic)
            with pytest.raises(ConnectionLost, match="limit"):
                await client.subscribe(topic + "2")
            await client.publish(topic, b"x")
            assert await contents(client, 1) == [b"x"]

    async def test_received_frame_over_max_payload_ends_the_client(self, start, topic):
        bus = start("--max-payload", "65536")
        address = str(bus.address())
        async with (
            rqueue.connect(address, max_payload=65536) as writer,
            rqueue.connect(address) as reader,
        ):
            await reader.subscribe(topic)
            await writer.publish_many(topic, [b"fits", bytes(10_000), b"fits"])
            assert await contents(reader, 1) == [b"fits"]
            with pytest.raises(BadFrame, match="payload_too_large") as caught:
                await receive(reader, 1)
            assert "max_payload" in caught.value.__notes__[0]
            with pytest.raises(BadFrame):
                await reader.publish(topic, b"x")

    async def test_connection_lost_during_a_large_publish_raises(self, topic):
        oracle = OracleServer()

        async def fickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(100):
                await oracle._obey(writer, *await oracle._read_frame(reader))

        async with listening(fickle) as address:
            client = rqueue.connect(address)
            await client.open()
            with pytest.raises(ConnectionLost):
                await client.publish(topic, bytes(60 * MIB))
            with pytest.raises(ConnectionLost):
                await client.close()

    async def test_loss_before_a_reconnect_is_not_raised_at_close(self, start, topic):
        bus = start()
        address = bus.address()
        async with rqueue.connect(str(address), backoff_max_s=0.1) as client:
            await client.publish(topic, b"perhaps lost")
            bus.close()
            start(port=address.port)
            await until(lambda: client.reconnects == 1)
            await client.publish(topic, b"arrives")

    async def test_loss_before_a_reconnect_is_raised_once_by_flush(self, start, topic):
        bus = start()
        address = bus.address()
        async with rqueue.connect(str(address), backoff_max_s=0.1) as client:
            await client.publish(topic, b"perhaps lost")
            bus.close()
            start(port=address.port)
            await until(lambda: client.reconnects == 1)
            await client.publish(topic, b"arrives")
            with pytest.raises(ConnectionLost, match="may be lost"):
                await client.flush()
            await client.flush()


async def test_publish_many_yields_to_other_tasks(address, topic):
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with rqueue.connect(address) as client:
        transport = (await client._reconnector.wait_connected())._transport
        assert transport is not None
        transport.set_write_buffer_limits(high=2**30)  # never full, so it never has to wait
        task = asyncio.create_task(other())
        await client.publish_many(topic, [bytes(1000)] * 20_000)
        task.cancel()
        assert turns > 10
