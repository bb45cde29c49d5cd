"""The blocking pirate client: the same names as the asyncio client, without `await`.

    with pirate.blocking.connect() as client:
        client.subscribe("news")
        client.put("news", b"hello")
        for message in client.messages("news"):
            print(message.id, message.timestamp_ns, message.body)

Any number of threads may use a client. One thread at a time may read a topic.
"""

from __future__ import annotations

from polybus.clients.blocking_facade import (
    BlockingFacade,
    blocking_connect,
    blocking_iterator,
    blocking_method,
    blocking_property,
)
from polybus.dialects.pirate.client import client
from polybus.dialects.pirate.client.client import Client

__all__ = ["BlockingClient", "connect"]


class BlockingClient(BlockingFacade[Client], of=Client):
    """One client of one bus. Use it in `with`, or call `open` and `close`."""

    open = blocking_method(Client.open)
    close = blocking_method(Client.close)
    server = blocking_property(Client.server)
    folder = blocking_property(Client.folder)
    id = blocking_property(Client.id)
    counter = blocking_property(Client.counter)
    subscriptions = blocking_property(Client.subscriptions)
    pending = blocking_property(Client.pending)
    outcome = blocking_property(Client.outcome)
    notices = blocking_property(Client.notices)
    subscribe = blocking_method(Client.subscribe)
    unsubscribe = blocking_method(Client.unsubscribe)
    put = blocking_method(Client.put)
    resume = blocking_method(Client.resume)
    forget = blocking_method(Client.forget)
    get = blocking_method(Client.get)
    record = blocking_method(Client.record)
    messages = blocking_iterator(Client.messages)


connect = blocking_connect(client.connect, BlockingClient)
