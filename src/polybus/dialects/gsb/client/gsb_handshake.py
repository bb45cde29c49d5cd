"""How a connection of a client begins: what the bus is told before all else.

A link says hello, then what this client serves and hears, and then sends a ping: when that is
answered, all of it has been read. So a call on a new link comes after what this client serves
is registered again. A lane, which carries one stream at a time, only says hello.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from polybus.clients.reconnector import complete_handshake
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.client.broadcast_subscription import BroadcastSubscriptions
from polybus.dialects.gsb.client.gsb_connection import GsbConnection
from polybus.dialects.gsb.client.gsb_options import ClientOptions
from polybus.dialects.gsb.client.gsb_stream import dial
from polybus.dialects.gsb.client.service_host import ServiceHost
from polybus.dialects.gsb.client.service_registration import ServiceRegistrations
from polybus.dialects.gsb.client.stream_connection_pool import NoServices
from polybus.model.address import Address

log = logging.getLogger("polybus.gsb")

PEER_NAME = "GSB bus"


class GsbHandshake:
    """Of one client: what it serves and hears, and where its bus is."""

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        serving: ServiceHost,
        listening: BroadcastSubscriptions,
        registering: ServiceRegistrations,
    ) -> None:
        self._address = address
        self._options = options
        self._serving = serving
        self._listening = listening
        self._registering = registering

    async def dial(self, on_end: Callable[[GsbConnection], None], *, again: bool) -> GsbConnection:
        """The link of the client; `again` if there was one before it."""
        link = GsbConnection(
            self._address, self._options, self._serving, self._listening.on_broadcast, on_end
        )
        await complete_handshake(
            link, self._handshake(link, again), self._options.connect_timeout_s, PEER_NAME
        )
        return link

    async def dial_stream_connection(
        self, on_end: Callable[[GsbConnection], None]
    ) -> GsbConnection:
        lane = GsbConnection(
            self._address, self._options, NoServices(), self._listening.on_broadcast, on_end
        )
        await complete_handshake(
            lane, self._handshake_stream(lane), self._options.connect_timeout_s, PEER_NAME
        )
        return lane

    async def _handshake(self, link: GsbConnection, again: bool) -> None:
        await dial(link)
        self._send_hello(link, pings=True)
        self._serving.link = link
        services = self._registering.send_all(link)
        topics = [
            link.send_request(topic_packet("subscribe", one)) for one in self._listening.topics
        ]
        await link.ping()
        await self._registering.wait_replies(link, services, again)
        for answer in topics:
            code, message = await answer
            if code:
                log.error("subscribing again was refused: %s", message)
        while late := self._registering.send_all(link, besides=services):  # added meanwhile
            services |= late
            await self._registering.wait_replies(link, late, again)

    async def _handshake_stream(self, lane: GsbConnection) -> None:
        await dial(lane)
        self._send_hello(lane, pings=False)  # one that is not read would not answer them
        await lane.ping()

    def _send_hello(self, link: GsbConnection, *, pings: bool) -> None:
        packet = pb.Packet()
        packet.hello.deadline_ms = self._options.deadline_ms
        packet.hello.credits, packet.hello.ping = True, pings
        link.send_packet(packet)


def topic_packet(verb: str, topic: str) -> pb.Packet:
    packet = pb.Packet()
    getattr(packet, f"{verb}_request").topic = topic
    return packet
