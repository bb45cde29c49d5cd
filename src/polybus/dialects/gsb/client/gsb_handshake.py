"""How a connection of a client begins: what the bus is told before all else.

A link says hello, then what this client serves and hears, and then sends a ping: when that is
answered, all of it has been read. So a call on a new link comes after what this client serves
is registered again. A lane, which carries one stream at a time, only says hello.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from polybus.clients.reconnector import reach
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.client.broadcast_subscription import Listening
from polybus.dialects.gsb.client.gsb_connection import Link
from polybus.dialects.gsb.client.gsb_options import ClientOptions
from polybus.dialects.gsb.client.gsb_stream import dial
from polybus.dialects.gsb.client.service_host import Serving
from polybus.dialects.gsb.client.service_registration import Registering
from polybus.dialects.gsb.client.stream_connection_pool import NoServices
from polybus.model.address import Address

log = logging.getLogger("polybus.gsb")

WHOM = "GSB bus"


class Introducing:
    """Of one client: what it serves and hears, and where its bus is."""

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        serving: Serving,
        listening: Listening,
        registering: Registering,
    ) -> None:
        self._address = address
        self._options = options
        self._serving = serving
        self._listening = listening
        self._registering = registering

    async def dial(self, on_end: Callable[[Link], None], *, again: bool) -> Link:
        """The link of the client; `again` if there was one before it."""
        link = Link(self._address, self._options, self._serving, self._listening.take, on_end)
        await reach(link, self._introduce(link, again), self._options.connect_timeout_s, WHOM)
        return link

    async def dial_lane(self, on_end: Callable[[Link], None]) -> Link:
        lane = Link(self._address, self._options, NoServices(), self._listening.take, on_end)
        await reach(lane, self._introduce_lane(lane), self._options.connect_timeout_s, WHOM)
        return lane

    async def _introduce(self, link: Link, again: bool) -> None:
        await dial(link)
        self._say_hello(link, pings=True)
        self._serving.link = link
        services = self._registering.send_all(link)
        topics = [link.asked(topic_packet("subscribe", one)) for one in self._listening.topics]
        await link.ping()
        await self._registering.take_answers(link, services, again)
        for answer in topics:
            code, message = await answer
            if code:
                log.error("subscribing again was refused: %s", message)
        while late := self._registering.send_all(link, besides=services):  # added meanwhile
            services |= late
            await self._registering.take_answers(link, late, again)

    async def _introduce_lane(self, lane: Link) -> None:
        await dial(lane)
        self._say_hello(lane, pings=False)  # one that is not read would not answer them
        await lane.ping()

    def _say_hello(self, link: Link, *, pings: bool) -> None:
        packet = pb.Packet()
        packet.hello.deadline_ms = self._options.deadline_ms
        packet.hello.credits, packet.hello.ping = True, pings
        link.send_packet(packet)


def topic_packet(verb: str, topic: str) -> pb.Packet:
    packet = pb.Packet()
    getattr(packet, f"{verb}_request").topic = topic
    return packet
