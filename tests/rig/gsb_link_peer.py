"""The other end of a link: a node that does what a test wants.

On a plain blocking socket, with a real bus:

with LinkPeer(bus.address("gsb"), key) as peer:
    peer.announce(neighbours=[peer.bus_id])
    peer.send_call(origin, "public/greeter")
    reply = peer.wait_for("call_reply")
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network.announcement import Announcement
from polybus.dialects.gsb.network.link_handshake import LinkHandshake
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.model.address import Address
from tests.rig.closing import Closing
from tests.rig.gsb_call_signer import CallSigner
from tests.rig.gsb_memory_peer import MemoryPeer
from tests.rig.gsb_peer import connect
from tests.rig.memory_bus import MemoryBus

INSTANCE = 7


class Node:
    """A node that a test plays: it makes announcements and signed calls."""

    bus_id: str

    def __init__(self, key: NodeKey, instance: int = INSTANCE) -> None:
        self.key, self.instance = key, instance
        self._sequence = time.time_ns()
        self._ids = 0
        self.heard: dict[str, Announcement] = {}
        self.signer = CallSigner(key, instance)

    def announcement(self, key: NodeKey, neighbours: Iterable[str]) -> Announcement:
        self._sequence += 1
        ids = tuple(sorted(neighbours))
        return Announcement.make(key, self.instance, self._sequence, ids)

    def announce_packet(self, *announcements: Announcement) -> pb.Announce:
        """Return announcements; without any, that of this node, which is linked to the bus."""
        chosen = announcements or (self.announcement(self.key, [self.bus_id]),)
        return pb.Announce(announcements=[one.encode() for one in chosen])

    def hear(self, announce: pb.Announce) -> None:
        for one in announce.announcements:
            decoded = Announcement.decode(one)
            self.heard[decoded.node_id] = decoded

    def call(self, address: str, to: str = "", data: bytes = b"", **fields: Any) -> pb.RelayCall:
        """Make a signed call of this node, to the bus if no node is named."""
        self._ids += 1
        call = pb.RelayCall(
            request_id=str(self._ids),
            address=address,
            data=data,
            hops=1,
            deadline_ms=5000,
            free_partials=64,
            free_bytes=1 << 20,
        )
        known = self.heard.get(to or self.bus_id)
        if known is not None:
            self.signer.sign(call, known)
        else:
            call.origin = bytes.fromhex(self.key.node_id[2:])
            call.target = bytes.fromhex((to or self.bus_id)[2:])
            call.mac = bytes(16)
        for name, value in fields.items():
            setattr(call, name, value)
        return call


class LinkPeer(Node, Closing):
    def __init__(
        self, address: Address, key: NodeKey, instance: int = INSTANCE, *, small: bool = False
    ) -> None:
        """`small` shrinks the receive buffer, for a node that does not read."""
        super().__init__(key, instance)
        handshake = LinkHandshake(key, instance, b"")
        self.peer = connect(address, first=pack(link_hello=handshake.hello()), small=small)
        proof = handshake.on_accept(self.peer.next("link_accept"))
        self.peer.send(pack(link_proof=proof))
        self.bus_id = handshake.node_id

    def announce(self, *announcements: Announcement) -> None:
        self.peer.send(pack(announce=self.announce_packet(*announcements)))

    def wait_for(self, kind: str) -> Any:
        """Return the next packet of this kind; answers pings and keeps announcements."""
        while True:
            packet = self.peer.packet()
            found = packet.WhichOneof("kind")
            if found == kind:
                return getattr(packet, kind)
            if found == "ping":
                self.peer.send(pack(pong=pb.Pong(token=packet.ping.token)))
            elif found == "announce":
                self.hear(packet.announce)

    def settle(self) -> None:
        """Return when the bus has handled everything that was sent before."""
        self.peer.send(pack(ping=pb.Ping(token=bytes(8))))
        self.wait_for("pong")

    def send_call(self, call: pb.RelayCall) -> None:
        self.peer.send(pack(relay_call=call))

    def close(self) -> None:
        self.peer.close()


class MemoryLink(Node):
    """The other end of a link with a bus in memory."""

    def __init__(self, bus: MemoryBus, key: NodeKey, instance: int = INSTANCE) -> None:
        super().__init__(key, instance)
        handshake = LinkHandshake(key, instance, b"")
        self.peer = MemoryPeer(bus)
        self.peer.send(link_hello=handshake.hello())
        proof = handshake.on_accept(self.peer.next("link_accept"))
        self.peer.send(link_proof=proof)
        self.bus_id = handshake.node_id
        self.peer.send(announce=self.announce_packet())
        bus.pass_time(1)  # for the announcements of the bus
        self.packets()

    def packets(self) -> list[pb.Packet]:
        """Return the received packets but pings; keeps announcements."""
        kept = []
        for packet in self.peer.packets():
            if packet.HasField("announce"):
                self.hear(packet.announce)
            elif not packet.HasField("ping"):
                kept.append(packet)
        return kept

    def send_call(self, call: pb.RelayCall) -> None:
        self.peer.send(relay_call=call)


def pack(**kind: Any) -> bytes:
    return pb.Packet(**kind).SerializeToString()
