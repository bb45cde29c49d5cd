"""The GSB client for asyncio (any loop, uvloop included).

    async with gsb.connect() as bus:
        @bus.service("greeter")
        async def greet(call):                 # return a value, or yield for a stream
            return {"hello": call.data["name"]}

        print(await bus.call("greeter", {"name": "Ada"}))
        async for item in bus.stream("greeter/many", {"n": 3}): ...

What the client promises:

- Every call ends once: with a value, or with an error whose type says what happened
  (failures.py). If the connection is lost it is `ConnectionLost`, and the service
  may have done what it was asked, or not: nothing is sent twice.
- A call or a stream that the program gives up (cancelled, timed out, iterator
  dropped) is cancelled at the bus, and there at the service.
- A stream is read no faster than the program takes it: what is not taken makes the
  service wait, at its `yield`. Nothing else waits: streams have connections of their own.
- After a lost connection it comes back by itself, and registers its services and
  subscriptions again before anything else is sent.
- Any number of tasks may use it at once.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import msgpack

from polybus.clients.reconnector import Reconnector
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.call_errors import error_from_status
from polybus.dialects.gsb.client.broadcast_subscription import BroadcastSubscriptions, Subscription
from polybus.dialects.gsb.client.gsb_connection import GsbConnection
from polybus.dialects.gsb.client.gsb_handshake import GsbHandshake, topic_packet
from polybus.dialects.gsb.client.gsb_options import ClientOptions, default_address
from polybus.dialects.gsb.client.outgoing_call import CallAnswer, Stream, StreamBuffer, decode_value
from polybus.dialects.gsb.client.service_host import Handler, HostedService, ServiceHost
from polybus.dialects.gsb.client.service_registration import ServiceRegistrations
from polybus.dialects.gsb.client.stream_connection_pool import StreamConnectionPool
from polybus.errors import Conflict, DeadlinePassed, PolybusError, UsageError
from polybus.model.address import Address

H = TypeVar("H", bound=Handler)
DEFAULTS = ClientOptions()
MS = 1000.0


class Client:
    """One client of one bus. Use it in `async with`, or call `open` and `close`."""

    def __init__(self, address: str | Address, options: ClientOptions) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options
        self._serving = ServiceHost(options.max_calls, options.threads)
        self._listening = BroadcastSubscriptions()
        self._registering = ServiceRegistrations(self._serving, options)
        self._introducing = GsbHandshake(
            self.address, options, self._serving, self._listening, self._registering
        )
        self._lifeline: Reconnector[GsbConnection] = Reconnector(
            "gsb", self.address, options, self._dial, self._link_ended, self._end
        )
        self._lanes = StreamConnectionPool(
            self._introducing.dial_stream_connection, options.stream_connections
        )
        self._pack = msgpack.Packer().pack
        self._closed = asyncio.Event()

    # --- opening and closing

    async def open(self) -> None:
        """Connect; `NotConnected` if no GSB bus answers. `async with` calls it.

        Services that were added before are registered; if one is refused, that is raised.
        """
        await self._lifeline.open()

    async def close(self) -> None:
        """Disconnect. Calls that are open, of either side, end; nothing is waited for."""
        self._closed.set()
        await self._registering.stop()
        await self._lifeline.close()
        await self._lanes.close()
        await self._serving.stop()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._lifeline.link is not None

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and made again."""
        return self._lifeline.reconnects

    @property
    def last_loss(self) -> str | None:
        """Why, the last time."""
        return self._lifeline.last_loss

    @property
    def open_calls(self) -> int:
        """Calls that wait for their answer: those made here, and those to services here."""
        link = self._lifeline.link
        calls = (0 if link is None else len(link.calls)) + self._lanes.open_calls
        return calls + self._serving.open_calls

    # --- calling

    async def call(self, address: str, data: Any = None, *, timeout_s: float | None = None) -> Any:
        """Call a service, and return its answer.

        `timeout_s` is for the whole call; without it the bus's deadline holds. If the
        service answers with a stream, that is a `UsageError`, and it is cancelled.
        """
        link = self._lifeline.link or await self._lifeline.wait_connected()
        if timeout_s is not None:
            return await self._call_within(link, address, data, timeout_s)
        return await self._call(link, address, data)

    def stream(self, address: str, data: Any = None, *, timeout_s: float | None = None) -> Stream:
        """Call a service that answers with a stream: an async iterator of its items.

        A service that answers with one value is a stream of that value. `timeout_s` is
        for each item; without it the bus's deadline holds.
        """

        return Stream(lambda: self._open_stream(address, data), address, timeout_s)

    async def ping(self) -> float:
        """Milliseconds to the bus and back."""
        link = await self._lifeline.wait_connected()
        began_s = time.perf_counter()
        async with asyncio.timeout(self.options.answer_timeout_s):
            await link.ping()
        return (time.perf_counter() - began_s) * MS

    # --- serving

    def service(self, service_id: str) -> Callable[[H], H]:
        """Register the function below as a service, at once if the client is open.

        It is not waited for: `registered` does, and raises what the bus refused, which
        is logged as well. A call behind it on this client comes after it.
        """

        def register(handler: H) -> H:
            self._check_new(service_id)
            self._serving.add(HostedService(service_id, handler))
            self._registering.register(self._lifeline.link, service_id)
            return handler

        return register

    async def register(self, service_id: str, handler: Handler) -> None:
        """Register a service; returns when it can be called. `Conflict` if it is taken."""
        await self._once_up()
        self.service(service_id)(handler)
        await self._registering.wait(service_id)

    async def registered(self) -> None:
        """Return when all services are registered, or raise what the bus has against one."""
        await self._once_up()
        await self._registering.wait_for_all()

    async def unregister(self, service_id: str) -> None:
        """Take a service back. Calls that are open go on to their end."""
        packet = pb.Packet()
        packet.unregister_request.service_id = service_id
        link = await self._lifeline.wait_connected()
        was_tried = self._registering.stop_retrying(service_id)
        code, message = await link.ask(packet)
        if code and not was_tried:
            raise error_from_status(code, message, f"unregister {service_id!r}")
        self._serving.remove(service_id)

    async def serve(self) -> None:
        """Serve until the client is closed; raises what ends it otherwise."""
        await self._registering.wait_for_all()
        await self._closed.wait()
        if self._failure is not None:
            raise self._failure

    # --- topics

    async def subscribe(self, topic: str) -> Subscription:
        """Receive what is published to a topic from now on, in any dialect."""
        made = Subscription(topic, self.options.max_unread_bytes, self._unsubscribe)
        self._listening.add(made)
        try:  # also if it is not the first: that may still be refused
            await self._ask_topic("subscribe", topic)
        except BaseException:
            self._listening.remove(made)
            raise
        return made

    async def broadcast(self, topic: str, data: Any = None, *, body: bytes | None = None) -> None:
        """Publish a value to a topic, or with `body` bytes as they are."""
        if data is not None and body is not None:
            raise UsageError("a broadcast has data or a body, not both")
        packet = pb.Packet()
        packet.broadcast_request.topic = topic
        packet.broadcast_request.data = self._packed(data) if body is None else body
        link = await self._lifeline.wait_connected()
        if link.is_full:
            await link.wait_room()
        code, message = await link.ask(packet)
        if code:
            raise error_from_status(code, message, f"broadcast to {topic!r}")

    # --- inside

    _failure: PolybusError | None = None

    async def _call(self, link: GsbConnection, address: str, data: Any) -> Any:
        if link.is_full:
            await link.wait_room()
        answer = CallAnswer(link, address, asyncio.get_running_loop())
        packed = b"" if data is None else self._packed(data)
        answer.request_id = link.call(_address(address), packed, answer)
        try:
            return decode_value(await answer.future, address)
        except asyncio.CancelledError:
            if link.is_up:
                link.cancel(answer.request_id)
            raise

    async def _open_stream(self, address: str, data: Any) -> StreamBuffer:
        called, packed = _address(address), self._packed(data)
        await self._lifeline.wait_connected()
        await self._registering.wait_settled()  # it goes another way, and must not come before them
        link = await self._lanes.acquire()
        received = StreamBuffer(link, address, self._lanes.release)
        try:
            received.request_id = link.call(called, packed, received)
        except BaseException:
            self._lanes.release(link)
            raise
        return received

    async def _call_within(
        self, link: GsbConnection, address: str, data: Any, timeout_s: float
    ) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(link, address, data)
        except TimeoutError:
            raise DeadlinePassed(f"{address}: no answer within {timeout_s:g} s") from None

    def _packed(self, data: Any) -> bytes:
        if data is None:
            return b""
        try:
            return bytes(self._pack(data))
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"data that msgpack cannot express: {error}") from None

    async def _once_up(self) -> None:
        """While the connection is down nothing is registered. Before `open`, that sees to it."""
        if self._lifeline.is_opened:
            await self._lifeline.wait_connected()

    def _check_new(self, service_id: str) -> None:
        if service_id in self._serving.services:
            raise Conflict(f"service {service_id!r} is registered by this client already")

    async def _ask_topic(self, verb: str, topic: str) -> None:
        link = await self._lifeline.wait_connected()
        code, message = await link.ask(topic_packet(verb, topic))
        if code:
            raise error_from_status(code, message, f"{verb} {topic!r}")

    async def _unsubscribe(self, subscription: Subscription) -> None:
        is_last = self._listening.remove(subscription)
        if is_last and self._lifeline.link is not None:
            await self._ask_topic("unsubscribe", subscription.topic)

    # --- the connection

    async def _dial(self) -> GsbConnection:
        again = self._lifeline.last_loss is not None
        return await self._introducing.dial(self._lifeline.on_connection_ended, again=again)

    def _link_ended(self, link: GsbConnection) -> None:
        self._serving.cancel_all()

    def _end(self, error: PolybusError) -> None:
        self._serving.cancel_all()
        self._failure = None if self._closed.is_set() else error
        self._listening.end(error)
        self._registering.fail(error)
        self._closed.set()


def _address(address: str) -> bytes:
    if not isinstance(address, str):
        raise UsageError(f"an address is text, not {type(address).__name__}")
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
    """A client of the bus at `address` (tcp://, tls+tcp:// or ipc://), to be used in a `with`.

    Without an address it is the bus of this user, the machine's in /run/polybus, or
    tcp://127.0.0.1:6569. See `ClientOptions` for what each setting does.
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
