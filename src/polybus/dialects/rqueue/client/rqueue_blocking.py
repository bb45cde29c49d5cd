"""The rqueue client for code that is not async. Same names, without `await`.

    with rqueue.blocking.connect() as client:
        client.subscribe("news")
        client.publish("news", b"hello")
        for message in client:
            print(message.topic, message.content)

Only one thread at a time may read from a client; others may publish meanwhile.
"""

from __future__ import annotations

from typing import Self

from polybus.clients.blocking_facade import (
    BlockingFacade,
    blocking_connect,
    blocking_iterator,
    blocking_method,
    blocking_property,
)
from polybus.dialects.rqueue.client import client
from polybus.dialects.rqueue.client.client import Client
from polybus.dialects.rqueue.client.notification_batch import Message

__all__ = ["BlockingClient", "connect"]


class BlockingClient(BlockingFacade[Client], of=Client):
    """One client of one server. Use it in `with`, or call `open` and `close`."""

    open = blocking_method(Client.open)
    close = blocking_method(Client.close)
    subscribe = blocking_method(Client.subscribe)
    remove = blocking_method(Client.remove)
    deregister = blocking_method(Client.deregister)
    publish = blocking_method(Client.publish)
    publish_many = blocking_method(Client.publish_many)
    flush = blocking_method(Client.flush)
    batches = blocking_iterator(Client.batches)
    next_batch = blocking_method(Client.next_batch)
    is_connected = blocking_property(Client.is_connected)
    reconnects = blocking_property(Client.reconnects)
    last_loss = blocking_property(Client.last_loss)
    lost_parts = blocking_property(Client.lost_parts)
    lost_messages = blocking_property(Client.lost_messages)
    inbox_bytes = blocking_property(Client.inbox_bytes)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        # Enter the event loop once per batch; messages are created in this thread.
        inbox = self._async.inbox
        while (message := inbox.next_message()) is None:
            if not self._background.run(inbox.start_batch()):
                raise StopIteration
        return message


connect = blocking_connect(client.connect, BlockingClient)
