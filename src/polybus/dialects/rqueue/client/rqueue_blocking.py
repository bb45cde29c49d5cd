"""The rqueue client for code that is not async. The same names, without `await`.

    with rqueue.blocking.connect() as client:
        client.subscribe("news")
        client.publish("news", b"hello")
        for message in client:
            print(message.topic, message.content)

One thread at a time may read from a client; others may publish meanwhile.
"""

from __future__ import annotations

from typing import Self

from polybus.clients.blocking_facade import Blocking, called, iterated, opened, read
from polybus.dialects.rqueue.client import client
from polybus.dialects.rqueue.client.client import Client
from polybus.dialects.rqueue.client.notification_batch import Message

__all__ = ["BlockingClient", "connect"]


class BlockingClient(Blocking[Client], of=Client):
    """One client of one server. Use it in `with`, or call `open` and `close`."""

    open = called(Client.open)
    close = called(Client.close)
    subscribe = called(Client.subscribe)
    remove = called(Client.remove)
    deregister = called(Client.deregister)
    publish = called(Client.publish)
    publish_many = called(Client.publish_many)
    flush = called(Client.flush)
    batches = iterated(Client.batches)
    next_batch = called(Client.next_batch)
    is_connected = read(Client.is_connected)
    reconnects = read(Client.reconnects)
    last_loss = read(Client.last_loss)
    lost_parts = read(Client.lost_parts)
    lost_messages = read(Client.lost_messages)
    inbox_bytes = read(Client.inbox_bytes)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        # The loop is asked once per batch; its messages are made here.
        inbox = self._async.inbox
        while (message := inbox.next_message()) is None:
            if not self._background.run(inbox.begin()):
                raise StopIteration
        return message


connect = opened(client.connect, BlockingClient)
