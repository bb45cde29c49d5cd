"""The pirate client for code that is not async. The same names, without `await`.

    with pirate.blocking.connect() as client:
        client.subscribe("news")
        client.put("news", b"hello")
        for message in client.messages("news"):
            print(message.id, message.timestamp_ns, message.body)

Any number of threads may use a client; one at a time may read a topic.
"""

from __future__ import annotations

from polybus.clients.blocking_facade import Blocking, called, iterated, opened, read
from polybus.dialects.pirate.client import client
from polybus.dialects.pirate.client.client import Client

__all__ = ["BlockingClient", "connect"]


class BlockingClient(Blocking[Client], of=Client):
    """One client of one bus. Use it in `with`, or call `open` and `close`."""

    open = called(Client.open)
    close = called(Client.close)
    server = read(Client.server)
    folder = read(Client.folder)
    id = read(Client.id)
    counter = read(Client.counter)
    subscriptions = read(Client.subscriptions)
    pending = read(Client.pending)
    outcome = read(Client.outcome)
    notices = read(Client.notices)
    subscribe = called(Client.subscribe)
    unsubscribe = called(Client.unsubscribe)
    put = called(Client.put)
    resume = called(Client.resume)
    forget = called(Client.forget)
    get = called(Client.get)
    record = called(Client.record)
    messages = iterated(Client.messages)


connect = opened(client.connect, BlockingClient)
