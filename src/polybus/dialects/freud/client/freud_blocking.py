"""The Freud client for code that is not async. The same names, without `await`.

    with freud.blocking.connect() as client:
        client.create_topic("news")
        with client.subscribe("news") as news:
            client.produce("news", b"hello")
            for record in news:
                print(record.message_id, record.timestamp_ns, record.body)

Any number of threads may use a client; one at a time may read a subscription.
"""

from __future__ import annotations

from typing import Self

from polybus.clients.blocking_facade import Blocking, called, called_for, opened, read
from polybus.dialects.freud.client import client
from polybus.dialects.freud.client.answer_batch import Record
from polybus.dialects.freud.client.client import Client
from polybus.dialects.freud.client.pull_subscription import Subscription

__all__ = ["BlockingClient", "BlockingSubscription", "connect"]


class BlockingSubscription(Blocking[Subscription], of=Subscription):
    """Made by `subscribe`: an iterator of what is produced from then on."""

    topic = read(Subscription.topic)
    id = read(Subscription.id)
    notice = read(Subscription.notice)
    get = called(Subscription.get)
    get_many = called(Subscription.get_many)
    unsubscribe = called(Subscription.unsubscribe)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        # The loop is asked once per round; what it brought is taken here.
        inbox = self._async.inbox
        while True:
            try:
                return inbox.records.popleft()
            except IndexError:
                if not self._background.run(inbox.begin()):
                    raise StopIteration from None


class BlockingClient(Blocking[Client], of=Client):
    """One client of one bus. Use it in `with`, or call `open` and `close`."""

    open = called(Client.open)
    close = called(Client.close)
    is_connected = read(Client.is_connected)
    create_topic = called(Client.create_topic)
    delete_topic = called(Client.delete_topic)
    list_topics = called(Client.list_topics)
    count_subscribers = called(Client.count_subscribers)
    produce = called(Client.produce)
    produce_many = called(Client.produce_many)
    subscribe = called_for(Client.subscribe, BlockingSubscription)


connect = opened(client.connect, BlockingClient)
