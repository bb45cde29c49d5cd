"""What every new connection of an rqueue client is told before it counts: all subscriptions.

A link counts as up only when its first echo is back: then the server is known to speak
rqueue, and everything in `topics` is subscribed.
"""

from __future__ import annotations

from collections.abc import Callable

from polybus.clients import reconnector
from polybus.dialects.rqueue.client.notification_batch import NotificationBatch
from polybus.dialects.rqueue.client.rqueue_connection import RqueueConnection, dial, subscribe_all
from polybus.dialects.rqueue.client.rqueue_options import ClientOptions
from polybus.errors import PolybusError
from polybus.model.address import Address


class RqueueReconnector(reconnector.Reconnector[RqueueConnection]):
    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        on_batch: Callable[[NotificationBatch], None],
        on_end: Callable[[RqueueConnection], None],
        on_failure: Callable[[PolybusError], None],
    ) -> None:
        super().__init__("rqueue", address, options, self._new_link, on_end, on_failure)
        self.address = address
        self.options = options
        self.topics: dict[bytes, None] = {}  # an ordered set: what to subscribe on every link
        self.wants_reading = True
        self._on_batch = on_batch

    def set_reading(self, wanted: bool) -> None:
        self.wants_reading = wanted
        if self.link is not None:
            self.link.set_reading(wanted)

    async def _new_link(self) -> RqueueConnection:
        most, reading = self.options.max_payload, self.wants_reading
        link = RqueueConnection(
            self.address, most, self._on_batch, self.on_connection_ended, reading=reading
        )
        timeout_s = self.options.connect_timeout_s
        await reconnector.complete_handshake(
            link, self._handshake(link), timeout_s, "rqueue server"
        )
        link.set_reading(self.wants_reading)
        return link

    async def _handshake(self, link: RqueueConnection) -> None:
        await dial(link, self.options.tls)
        await subscribe_all(link, self.topics, self.options.connect_timeout_s)
