"""The GSB client for code that is not async. The same names, without `await`.

    with gsb.blocking.connect() as bus:
        @bus.service("greeter")
        def greet(call):                      # runs in a thread; may yield for a stream
            return {"hello": call.data["name"]}

        print(bus.call("greeter", {"name": "Ada"}))
        for item in bus.stream("greeter/many", {"n": 3}): ...

Any number of threads may use a client; one at a time may read a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

from polybus.clients.blocking_facade import Blocking, called, called_for, opened, read
from polybus.dialects.gsb.client import client
from polybus.dialects.gsb.client.broadcast_subscription import Broadcast, Subscription
from polybus.dialects.gsb.client.client import Client
from polybus.dialects.gsb.client.outgoing_call import Stream
from polybus.dialects.gsb.client.service_host import Handler

__all__ = ["BlockingClient", "BlockingStream", "BlockingSubscription", "connect"]

H = TypeVar("H", bound=Handler)


class BlockingStream(Blocking[Stream], of=Stream):
    """Made by `stream`: an iterator of what the service yields."""

    begin = called(Stream.begin)
    aclose = close = called(Stream.aclose)

    def next_item(self) -> Any:
        return self._async.next_item()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # The loop is asked once for all that is there; what it brought is taken here.
        while True:
            try:
                return self._async.next_item()
            except IndexError:
                if not self._background.run(self._async.begin()):
                    raise StopIteration from None


class BlockingSubscription(Blocking[Subscription], of=Subscription):
    """Made by `subscribe`: an iterator of what is broadcast from then on."""

    topic = read(Subscription.topic)
    lost = read(Subscription.lost)
    get = called(Subscription.get)
    unsubscribe = called(Subscription.unsubscribe)
    put = end = None  # the client's own

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Broadcast:
        try:
            return self._background.run(_next(self._async))
        except StopAsyncIteration:
            raise StopIteration from None


class BlockingClient(Blocking[Client], of=Client):
    """One client of one bus. Use it in `with`, or call `open` and `close`."""

    open = called(Client.open)
    close = called(Client.close)
    is_connected = read(Client.is_connected)
    reconnects = read(Client.reconnects)
    last_loss = read(Client.last_loss)
    open_calls = read(Client.open_calls)
    call = called(Client.call)
    ping = called(Client.ping)
    register = called(Client.register)
    registered = called(Client.registered)
    unregister = called(Client.unregister)
    serve = called(Client.serve)
    subscribe = called_for(Client.subscribe, BlockingSubscription)
    broadcast = called(Client.broadcast)

    def stream(
        self, address: str, data: Any = None, *, timeout_s: float | None = None
    ) -> BlockingStream:
        """Call a service that answers with a stream: an iterator of its items."""
        return BlockingStream(lambda: self._async.stream(address, data, timeout_s=timeout_s))

    def service(self, service_id: str) -> Callable[[H], H]:
        """Register the function below as a service; raises what the bus has against it."""

        def register(handler: H) -> H:
            self.register(service_id, handler)
            return handler

        return register


async def _next(subscription: Subscription) -> Broadcast:
    return await anext(subscription)


connect = opened(client.connect, BlockingClient)
