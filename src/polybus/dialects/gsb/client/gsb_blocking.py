"""The blocking GSB client: the same names as the asyncio client, without `await`.

    with gsb.blocking.connect() as bus:
        @bus.service("greeter")
        def greet(call):                      # runs in a thread; may yield for a stream
            return {"hello": call.data["name"]}

        print(bus.call("greeter", {"name": "Ada"}))
        for item in bus.stream("greeter/many", {"n": 3}): ...

Any number of threads may use a client. One thread at a time may read a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

from polybus.clients.blocking_facade import (
    BlockingFacade,
    blocking_connect,
    blocking_factory,
    blocking_method,
    blocking_property,
)
from polybus.dialects.gsb.client import client
from polybus.dialects.gsb.client.broadcast_subscription import Broadcast, Subscription
from polybus.dialects.gsb.client.client import Client
from polybus.dialects.gsb.client.outgoing_call import Stream
from polybus.dialects.gsb.client.service_host import Handler

__all__ = ["BlockingClient", "BlockingStream", "BlockingSubscription", "connect"]

H = TypeVar("H", bound=Handler)


class BlockingStream(BlockingFacade[Stream], of=Stream):
    """An iterator of the items of a stream. Made by `stream`."""

    begin = blocking_method(Stream.begin)
    aclose = close = blocking_method(Stream.aclose)

    def next_item(self) -> Any:
        return self._async.next_item()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # One call to the loop fetches all available items.
        while True:
            try:
                return self._async.next_item()
            except IndexError:
                if not self._background.run(self._async.begin()):
                    raise StopIteration from None


class BlockingSubscription(BlockingFacade[Subscription], of=Subscription):
    """An iterator of new messages of a topic. Made by `subscribe`."""

    topic = blocking_property(Subscription.topic)
    lost = blocking_property(Subscription.lost)
    get = blocking_method(Subscription.get)
    unsubscribe = blocking_method(Subscription.unsubscribe)
    put = end = None  # not part of the public API

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Broadcast:
        return self._background.next(self._async)


class BlockingClient(BlockingFacade[Client], of=Client):
    """One client of one bus. Use it in `with`, or call `open` and `close`."""

    open = blocking_method(Client.open)
    close = blocking_method(Client.close)
    is_connected = blocking_property(Client.is_connected)
    reconnects = blocking_property(Client.reconnects)
    last_loss = blocking_property(Client.last_loss)
    open_calls = blocking_property(Client.open_calls)
    call = blocking_method(Client.call)
    ping = blocking_method(Client.ping)
    register = blocking_method(Client.register)
    registered = blocking_method(Client.registered)
    unregister = blocking_method(Client.unregister)
    serve = blocking_method(Client.serve)
    subscribe = blocking_factory(Client.subscribe, BlockingSubscription)
    broadcast = blocking_method(Client.broadcast)

    def stream(
        self, address: str, data: Any = None, *, timeout_s: float | None = None
    ) -> BlockingStream:
        """Call a service and return an iterator of the items of its reply."""
        return BlockingStream(lambda: self._async.stream(address, data, timeout_s=timeout_s))

    def service(self, service_id: str) -> Callable[[H], H]:
        """Return a decorator that registers a function as a service. Raises a refusal."""

        def register(handler: H) -> H:
            self.register(service_id, handler)
            return handler

        return register


connect = blocking_connect(client.connect, BlockingClient)
