"""The Freud client for code that is not async. Same names, without `await`.

    with freud.blocking.connect() as client:
        client.create_topic("news")
        with client.subscribe("news") as news:
            client.produce("news", b"hello")
            for record in news:
                print(record.message_id, record.timestamp_ns, record.body)

Any number of threads may use a client; only one at a time may read a subscription.
"""

from __future__ import annotations

from typing import Self

from polybus.clients.blocking_facade import (
    BlockingFacade,
    blocking_connect,
    blocking_factory,
    blocking_method,
    blocking_property,
)
from polybus.dialects.freud.client import client
from polybus.dialects.freud.client.answer_batch import Record
from polybus.dialects.freud.client.client import Client
from polybus.dialects.freud.client.pull_subscription import Subscription

__all__ = ["BlockingClient", "BlockingSubscription", "connect"]


class BlockingSubscription(BlockingFacade[Subscription], of=Subscription):
    """An iterator of the messages produced since `subscribe` returned."""

    topic = blocking_property(Subscription.topic)
    id = blocking_property(Subscription.id)
    notice = blocking_property(Subscription.notice)
    get = blocking_method(Subscription.get)
    get_many = blocking_method(Subscription.get_many)
    unsubscribe = blocking_method(Subscription.unsubscribe)
    detach = blocking_method(Subscription.detach)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        # Enter the event loop once per round; records are popped in this thread.
        inbox = self._async.inbox
        while True:
            try:
                return inbox.records.popleft()
            except IndexError:
                if not self._background.run(inbox.fetch_next()):
                    raise StopIteration from None


class BlockingClient(BlockingFacade[Client], of=Client):
    """One client of one bus. Use it in `with`, or call `open` and `close`."""

    open = blocking_method(Client.open)
    close = blocking_method(Client.close)
    is_connected = blocking_property(Client.is_connected)
    create_topic = blocking_method(Client.create_topic)
    delete_topic = blocking_method(Client.delete_topic)
    list_topics = blocking_method(Client.list_topics)
    count_subscribers = blocking_method(Client.count_subscribers)
    produce = blocking_method(Client.produce)
    produce_many = blocking_method(Client.produce_many)
    subscribe = blocking_factory(Client.subscribe, BlockingSubscription)
    attach = blocking_factory(Client.attach, BlockingSubscription)


connect = blocking_connect(client.connect, BlockingClient)
