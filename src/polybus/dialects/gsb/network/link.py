"""One link: a connection with another bus, from its handshake to its end.

A link is a GSB connection whose peer is both a caller and a service: the other bus sends calls
(`relay_call`) and answers those of this one (`call_reply`). A link never waits: it is always read,
because two links that wait for each other would wait forever.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from polybus.dialects.gsb import codec
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network.link_handshake import BAD_HANDSHAKE
from polybus.dialects.gsb.server.call_table import NodeService
from polybus.errors import BadFrame

if TYPE_CHECKING:
    from polybus.dialects.gsb.network.call_key import CallKey
    from polybus.dialects.gsb.network.link_handshake import LinkHandshake
    from polybus.dialects.gsb.network.network import Network
    from polybus.dialects.gsb.server.session import GsbSession

MAX_CREDIT = 1 << 16  # PARTIALs of one grant
NS_PER_S = 1_000_000_000


class Link:
    def __init__(
        self, network: Network, session: GsbSession, handshake: LinkHandshake, address: str = ""
    ) -> None:
        """`address` is the one that was dialled; empty if the other bus has dialled."""
        self._network = network
        self.session = session
        self._handshake = handshake
        self.address = address
        self.began_s = network.now_s()
        self.round_trip_s: float | None = None
        self.challenged_s: float | None = None  # when it was asked for a sign of life
        self.end_reason = ""  # why this bus has ended it
        # The nodes beyond this link, as services for the calls that go to them.
        self._nodes: dict[str, NodeService] = {}
        self.announcements_left = 0.0  # that it may send at once
        session.link = self
        session.is_link = session.credits = True

    @property
    def node_id(self) -> str:
        return self._handshake.node_id

    @property
    def instance(self) -> int:
        return self._handshake.instance

    @property
    def is_dialled(self) -> bool:
        return bool(self.address)

    @property
    def is_up(self) -> bool:
        return self.session.is_link_up

    def begin(self) -> None:
        """Send the first packet of the dialler."""
        self.session.send_packet(pb.Packet(link_hello=self._handshake.hello()))

    def accept(self, hello: pb.LinkHello) -> None:
        """Answer the first packet of a dialler. Raises `BadFrame`."""
        self.session.send_packet(pb.Packet(link_accept=self._handshake.on_hello(hello)))

    def service_for(self, node: str, key: CallKey) -> NodeService:
        """Return the service by which calls to a node go over this link."""
        service = self._nodes.get(node)
        if service is None:
            service = self._nodes[node] = NodeService(node, self.session, key)
        return service

    def forget_nodes(self) -> None:
        """Drop the services of nodes, when paths have changed. Open calls keep theirs."""
        self._nodes.clear()

    def ping(self) -> None:
        token = time.monotonic_ns().to_bytes(8, "big")
        self.session.send_packet(pb.Packet(ping=pb.Ping(token=token)))

    def describe(self) -> dict[str, int | str]:
        """The fields of `polybus connections`."""
        return {
            "node": self.node_id,
            "open_calls": len(self.session.calls),
            "serving": len(self.session.serving),
            "state": "link" if self.is_up else "handshake",
        }

    # --- packets

    def receive(self, kind: str | None, packet: pb.Packet) -> None:
        """Handle a packet of the other bus. Raises `BadFrame` to end the link."""
        if not self.is_up:
            self._shake_hands(kind, packet)
            return
        calls = self._network.calls
        match kind:
            case "call_reply" | "relay_call":
                self.session.take_decoded(packet)
            case "cancel":
                calls.cancel(self.session, packet.cancel.request_id.encode())
            case "credit":
                self._on_credit(packet.credit)
            case "announce":
                self._network.on_announce(self, packet.announce)
            case "ping":
                self.session.send_packet(pb.Packet(pong=pb.Pong(token=packet.ping.token[:64])))
            case "pong":
                self._on_pong(packet.pong.token)
            case _:
                raise BadFrame(codec.WRONG_DIRECTION)

    def _shake_hands(self, kind: str | None, packet: pb.Packet) -> None:
        if kind == "link_accept" and self.is_dialled:
            proof = self._handshake.on_accept(packet.link_accept)
            # Before the proof: the other bus must not use a link that this one refuses.
            self._network.check(self)
            self.session.send_packet(pb.Packet(link_proof=proof))
        elif kind == "link_proof" and not self.is_dialled:
            self._handshake.on_proof(packet.link_proof)
            self._network.check(self)
        else:
            raise BadFrame(BAD_HANDSHAKE)
        self._network.on_up(self)

    def _on_credit(self, credit: pb.Credit) -> None:
        if not 0 < credit.replies <= MAX_CREDIT:
            raise BadFrame("bad_credit")
        call = self.session.calls.get(credit.request_id.encode())
        if call is not None:  # else it has ended
            self._network.calls.pressure.on_credit(call, credit.replies)

    def _on_pong(self, token: bytes) -> None:
        sent_ns, now_ns = int.from_bytes(token[:8], "big"), time.monotonic_ns()
        if sent_ns <= now_ns:
            self.round_trip_s = (now_ns - sent_ns) / NS_PER_S
