"""The GSB client for asyncio (any loop, uvloop included).

    async with gsb.connect() as bus:
        @bus.service("greeter")
        async def greet(call):                 # return a value, or yield for a stream
            return {"hello": call.data["name"]}

        print(await bus.call("greeter", {"name": "Ada"}))
        async for item in bus.stream("greeter/many", {"n": 3}): ...

Guarantees of the client:

- Every call ends once, with a value or with an error whose type names the cause (codec.py). If
  the connection is lost, the error is `ConnectionLost` and the service may have executed the
  call or not. No call is sent twice.
- A call or stream that the program abandons (cancelled, timed out, iterator dropped) is
  cancelled at the bus and at the service.
- A stream is read no faster than the program takes its items. Unread items make the service
  wait at its `yield`, and nothing else, because streams have connections of their own.
- After a lost connection the client reconnects, and registers its services and subscriptions
  again before it sends anything else.
- Any number of tasks may use a client at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from polybus.clients.reconnector import ReconnectingClient, Reconnector, complete_handshake
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.client.broadcast_subscription import BroadcastSubscriptions, Subscription
from polybus.dialects.gsb.client.gsb_connection import GsbConnection, dial
from polybus.dialects.gsb.client.gsb_options import ClientOptions, default_address
from polybus.dialects.gsb.client.outgoing_call import CallAnswer, Stream, StreamBuffer, decode_value
from polybus.dialects.gsb.client.service_host import Handler, HostedService, ServiceHost
from polybus.dialects.gsb.client.service_registration import ServiceRegistrations
from polybus.dialects.gsb.client.stream_connection_pool import StreamConnectionPool
from polybus.dialects.gsb.codec import error_from_status
from polybus.errors import Conflict, DeadlinePassed, PolybusError, UsageError
from polybus.model.address import Address

log = logging.getLogger("polybus.gsb")

PEER_NAME = "GSB bus"


def topic_packet(verb: str, topic: str) -> pb.Packet:
    packet = pb.Packet()
    getattr(packet, f"{verb}_request").topic = topic
    return packet


H = TypeVar("H", bound=Handler)
DEFAULTS = ClientOptions()
MS = 1000.0


class Client(ReconnectingClient[GsbConnection]):
    """One client of one bus. Use it in `async with`, or call `open` and `close`."""

    def __init__(self, address: str | Address, options: ClientOptions) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options
        self._host = ServiceHost(options.max_calls, options.threads)
        self._subscriptions = BroadcastSubscriptions()
        self._registrations = ServiceRegistrations(self._host)
        self._reconnector = Reconnector(
            "gsb", self.address, options, self._dial, lambda _: self._host.cancel_all(), self._end
        )
        self._stream_pool = StreamConnectionPool(self._dial_stream, options.stream_connections)
        self._pack = msgpack.Packer().pack
        self._closed = asyncio.Event()

    # --- opening and closing

    async def open(self) -> None:
        """Connect and register the services added so far. `async with` calls it.

        Raises `NotConnected` if no GSB bus answers, or the error of a refused service.
        """
        await self._reconnector.open()

    async def close(self) -> None:
        """Disconnect. Open calls of both sides end at once."""
        self._closed.set()
        await self._registrations.stop()
        await self._reconnector.close()
        await self._stream_pool.close()
        await self._host.stop()

    @property
    def open_calls(self) -> int:
        """Number of unanswered calls, made by this client or to its services."""
        link = self._reconnector.connection
        calls = (0 if link is None else len(link.calls)) + self._stream_pool.open_calls
        return calls + self._host.open_calls

    # --- calling

    async def call(self, address: str, data: Any = None, *, timeout_s: float | None = None) -> Any:
        """Call a service and return its reply.

        `timeout_s` is for the whole call; without it the bus's deadline applies. Raises
        `UsageError` and cancels the call if the service replies with a stream.
        """
        connection = self._reconnector.connection or await self._reconnector.wait_connected()
        if timeout_s is None:
            return await self._call(connection, address, data)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(connection, address, data)
        except TimeoutError:
            raise DeadlinePassed(f"{address}: no reply within {timeout_s:g} s") from None

    def stream(self, address: str, data: Any = None, *, timeout_s: float | None = None) -> Stream:
        """Call a service and return an async iterator of the items of its reply.

        A reply with one value is a stream of that value. `timeout_s` is for each item; without
        it the bus's deadline applies.
        """

        async def open_call() -> StreamBuffer:
            encoded, packed = _encode_address(address), self._packed(data)
            await self._reconnector.wait_connected()
            # A stream uses another connection and must not overtake registrations.
            await self._registrations.wait_settled()
            connection = await self._stream_pool.acquire()
            buffer = StreamBuffer(connection, address, self._stream_pool.release)
            try:
                connection.call(encoded, packed, buffer)
            except BaseException:
                self._stream_pool.release(connection)
                raise
            return buffer

        return Stream(open_call, address, timeout_s)

    async def ping(self) -> float:
        """Return the round-trip time to the bus in milliseconds."""
        connection = await self._reconnector.wait_connected()
        began_s = time.perf_counter()
        async with asyncio.timeout(self.options.answer_timeout_s):
            await connection.ping()
        return (time.perf_counter() - began_s) * MS

    # --- serving

    def service(self, service_id: str) -> Callable[[H], H]:
        """Return a decorator that registers a function as a service.

        It does not wait for the bus. `registered` does, and raises the error of a refused
        service, which is also logged. A later call of this client comes after the registration.
        """

        def register(handler: H) -> H:
            if service_id in self._host.services:
                raise Conflict(f"service {service_id!r} is already registered by this client")
            self._host.add(HostedService(service_id, handler))
            self._registrations.register(self._reconnector.connection, service_id)
            return handler

        return register

    async def register(self, service_id: str, handler: Handler) -> None:
        """Register a service and wait until it can be called.

        Raises `Conflict` if the name is taken.
        """
        await self._once_up()
        self.service(service_id)(handler)
        await self._registrations.wait(service_id)

    async def registered(self) -> None:
        """Wait until all services are registered. Raises the error of a refused one."""
        await self._once_up()
        await self._registrations.wait_for_all()

    async def unregister(self, service_id: str) -> None:
        """Unregister a service. Open calls continue."""
        request = pb.UnregisterRequest(service_id=service_id)
        connection = await self._reconnector.wait_connected()
        was_retrying = self._registrations.stop_retrying(service_id)
        code, message = await connection.ask(pb.Packet(unregister_request=request))
        if code and not was_retrying:
            raise error_from_status(code, message, f"unregister {service_id!r}")
        self._host.remove(service_id)

    async def serve(self) -> None:
        """Serve until the client is closed. Raises the error that ends it otherwise."""
        await self._registrations.wait_for_all()
        await self._closed.wait()
        if self._failure is not None:
            raise self._failure

    # --- topics

    async def subscribe(self, topic: str) -> Subscription:
        """Subscribe to the messages that any dialect publishes to a topic from now on."""
        subscription = Subscription(topic, self.options.max_unread_bytes, self._unsubscribe)
        self._subscriptions.add(subscription)
        try:  # also if the topic is already subscribed: that request may still be refused
            await self._ask_topic("subscribe", topic)
        except BaseException:
            self._subscriptions.remove(subscription)
            raise
        return subscription

    async def broadcast(self, topic: str, data: Any = None, *, body: bytes | None = None) -> None:
        """Publish a value to a topic, or raw bytes with `body`."""
        if data is not None and body is not None:
            raise UsageError("a broadcast must have data or a body, got both")
        encoded = self._packed(data) if body is None else body
        request = pb.BroadcastRequest(topic=topic, data=encoded)
        connection = await self._reconnector.wait_connected()
        if connection.is_full:
            await connection.wait_room()
        code, message = await connection.ask(pb.Packet(broadcast_request=request))
        if code:
            raise error_from_status(code, message, f"broadcast to {topic!r}")

    # --- inside

    _failure: PolybusError | None = None

    async def _call(self, connection: GsbConnection, address: str, data: Any) -> Any:
        if connection.is_full:
            await connection.wait_room()
        answer = CallAnswer(connection, address, asyncio.get_running_loop())
        connection.call(_encode_address(address), self._packed(data), answer)
        try:
            return decode_value(await answer.future, address)
        except asyncio.CancelledError:
            if connection.is_up:
                connection.cancel(answer.request_id)
            raise

    def _packed(self, data: Any) -> bytes:
        if data is None:
            return b""
        try:
            return bytes(self._pack(data))
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"data must be a msgpack value: {error}") from None

    async def _once_up(self) -> None:
        """Wait for a connection. Before `open` return at once: `open` registers all services."""
        if self._reconnector.is_opened:
            await self._reconnector.wait_connected()

    async def _ask_topic(self, verb: str, topic: str) -> None:
        connection = await self._reconnector.wait_connected()
        code, message = await connection.ask(topic_packet(verb, topic))
        if code:
            raise error_from_status(code, message, f"{verb} {topic!r}")

    async def _unsubscribe(self, subscription: Subscription) -> None:
        is_last = self._subscriptions.remove(subscription)
        if is_last and self._reconnector.connection is not None:
            await self._ask_topic("unsubscribe", subscription.topic)

    # --- the connections

    async def _dial(self) -> GsbConnection:
        """Dial the main connection.

        It sends a hello, the services and the subscriptions, and then a ping. The answer to the
        ping means that the bus has read all of them, so a call on the connection comes after
        the registration of this client's services.
        """
        is_reconnect = self._reconnector.last_loss is not None
        connection = GsbConnection(
            self.address,
            self.options,
            self._host,
            self._subscriptions.on_broadcast,
            self._reconnector.on_connection_ended,
        )

        async def introduce() -> None:
            await dial(connection)
            self._send_hello(connection, pings=True)
            self._host.connection = connection
            services = self._registrations.send_all(connection)
            topics = [
                connection.send_request(topic_packet("subscribe", topic))
                for topic in self._subscriptions.topics
            ]
            await connection.ping()
            await self._registrations.wait_replies(connection, services, is_reconnect)
            for answer in topics:
                code, message = await answer
                if code:
                    log.error("cannot subscribe again after a reconnect: %s", message)
            # Services that the program added during the handshake.
            while late := self._registrations.send_all(connection, besides=services):
                services |= late
                await self._registrations.wait_replies(connection, late, is_reconnect)

        await complete_handshake(connection, introduce(), self.options.connect_timeout_s, PEER_NAME)
        return connection

    async def _dial_stream(self, on_end: Callable[[GsbConnection], None]) -> GsbConnection:
        """Dial a connection for streams. It registers no service, so its host stays empty."""
        no_services = ServiceHost(max_calls=0, threads=1)
        connection = GsbConnection(
            self.address, self.options, no_services, self._subscriptions.on_broadcast, on_end
        )

        async def introduce() -> None:
            await dial(connection)
            # No pings of the bus: a connection that is not read could not answer them.
            self._send_hello(connection, pings=False)
            await connection.ping()

        await complete_handshake(connection, introduce(), self.options.connect_timeout_s, PEER_NAME)
        return connection

    def _send_hello(self, connection: GsbConnection, *, pings: bool) -> None:
        hello = pb.Hello(deadline_ms=self.options.deadline_ms, credits=True, ping=pings)
        connection.send_packet(pb.Packet(hello=hello))

    def _end(self, error: PolybusError) -> None:
        """Fail everything that waits: there will be no further connection."""
        self._host.cancel_all()
        self._failure = None if self._closed.is_set() else error
        self._subscriptions.end(error)
        self._registrations.fail(error)
        self._closed.set()


def _encode_address(address: str) -> bytes:
    if not isinstance(address, str):
        raise UsageError(f"an address must be a str, got {type(address).__name__}")
    return address.encode("utf-8", "surrogatepass")


def connect(
    address: str | Address | None = None,
    *,
    deadline_s: float | None = DEFAULTS.deadline_s,
    max_packet_bytes: int = DEFAULTS.max_packet_bytes,
    stream_connections: int = DEFAULTS.stream_connections,
    max_unread_bytes: int = DEFAULTS.max_unread_bytes,
    cut_unread_bytes: int = DEFAULTS.cut_unread_bytes,
    max_calls: int = DEFAULTS.max_calls,
    threads: int = DEFAULTS.threads,
    connect_timeout_s: float = DEFAULTS.connect_timeout_s,
    wait_timeout_s: float = DEFAULTS.wait_timeout_s,
    answer_timeout_s: float = DEFAULTS.answer_timeout_s,
    reconnect: bool = DEFAULTS.reconnect,
    backoff_first_s: float = DEFAULTS.backoff_first_s,
    backoff_max_s: float = DEFAULTS.backoff_max_s,
    tls: ssl.SSLContext | None = DEFAULTS.tls,
) -> Client:
    """Return a client of the bus at `address` (tcp://, tls+tcp:// or ipc://).

    Use it in `async with`. The default address is the socket of this user's bus, then the
    machine's in /run/polybus, then tcp://127.0.0.1:6569. `ClientOptions` documents the settings.
    """
    return Client(
        default_address() if address is None else address,
        ClientOptions(
            deadline_s=deadline_s,
            max_packet_bytes=max_packet_bytes,
            stream_connections=stream_connections,
            max_unread_bytes=max_unread_bytes,
            cut_unread_bytes=cut_unread_bytes,
            max_calls=max_calls,
            threads=threads,
            connect_timeout_s=connect_timeout_s,
            wait_timeout_s=wait_timeout_s,
            answer_timeout_s=answer_timeout_s,
            reconnect=reconnect,
            backoff_first_s=backoff_first_s,
            backoff_max_s=backoff_max_s,
            tls=tls,
        ),
    )
