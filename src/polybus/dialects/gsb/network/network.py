"""The network of this node: its links, the nodes beyond them, and the calls between nodes.

A call to another node is a call whose service is a link:

    caller ──▶ this bus ──relay_call──▶ bus B ──relay_call──▶ bus C ──call_request──▶ service
       ◀──────────────────────────── call_reply, hop by hop ────────────────────────────

Each bus has the call in its tables, so each of them ends it exactly once: a link that breaks is a
service that went away, and a cancel, a deadline and credits travel along the same way.

The origin signs the call for its target (call_signer.py), which decides by its own rules whether
the calling node may call the service. Nodes between them relay and decide nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network.announcement import MAX_NEIGHBOURS, Announcement
from polybus.dialects.gsb.network.call_signer import CallSigner
from polybus.dialects.gsb.network.link import Link
from polybus.dialects.gsb.network.link_handshake import LinkHandshake
from polybus.dialects.gsb.network.node_key import ID_BYTES, node_id_of
from polybus.dialects.gsb.network.topology import MAX_HOPS, REFRESH_S, Novelty, Topology
from polybus.dialects.gsb.server.call_table import Route
from polybus.dialects.gsb.server.service_registry import ServiceStatus
from polybus.dialects.gsb.service_address import StatusCode, parse_address
from polybus.errors import BadFrame, MalformedRequest
from polybus.model.identity import Identity

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.timers import Timers
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.network.node_key import NodeKey
    from polybus.dialects.gsb.server.call_router import CallRouter
    from polybus.dialects.gsb.server.call_table import OpenCall, Service
    from polybus.dialects.gsb.server.session import GsbSession

HANDSHAKE_TIMEOUT_S = 10.0
PING_S = 5.0
SILENT_S = 15.0  # a link that is silent for this long is broken
FLOOD_DELAY_S = 0.01  # announcements of this time travel together
MAX_ANNOUNCED = 32  # announcements in one packet
ANNOUNCEMENTS_PER_S = 200.0  # of one link; a signature takes some 150 µs to check
RELAY_BYTES = 512  # of a relayed call besides its data; more than the longest address and ids
MAX_FREE_BYTES = 1 << 24

# Reasons for which a link is refused or closed. They are names of counters.
OWN_NODE = "own_node"
DUPLICATE_LINK = "duplicate_link"
DUPLICATE_NODE = "duplicate_node"
TOO_MANY_LINKS = "max_links"
BAD_ANNOUNCEMENT = "bad_announcement"
ANNOUNCEMENT_FLOOD = "announcement_flood"
BAD_RELAY = "bad_relay"
LINK_TIMEOUT = "link_timeout"
ALARM = "duplicate_node"
# The service that every node has for all others: it returns its data.
PUBLIC_PING = "public/gsb/ping"
PING = ServiceStatus(StatusCode.OK)


@dataclass(slots=True)
class NodeAccount:
    """What the calls of one node have cost."""

    calls: int = 0
    failures: int = 0
    request_bytes: int = 0
    reply_bytes: int = 0


class Network:
    calls: CallRouter

    def __init__(self, broker: Broker, limits: GsbLimits, timers: Timers, key: NodeKey) -> None:
        self._broker = broker
        self._limits = limits
        self._timers = timers
        self._key = key
        self.node_id = key.node_id
        self.now_s = broker.now_s
        self._instance = random.SystemRandom().getrandbits(63)
        self.topology = Topology(key.node_id, limits.max_nodes)
        self._signer = CallSigner(key, self._instance)
        self._sequence = broker.wall_ns() // 1_000_000  # above that of an earlier run
        self.links: dict[str, Link] = {}
        self._unproved: dict[Link, None] = {}
        self._accounts: dict[str, NodeAccount] = {}
        self._to_flood: dict[str, Link | None] = {}  # nodes, and the link that announced each
        self._is_flood_scheduled = False
        self._announced_s = self._pinged_s = broker.now_s()
        self._is_stopping = False

    def start(self, calls: CallRouter) -> None:
        """Begin to announce this node, whose calls the router routes."""
        self.calls = calls
        self.announce()
        self._broker.on_tick.append(self.tick)

    # --- links

    def open_link(self, session: GsbSession, address: str, expected: str) -> Link:
        """Begin a link on a connection that this bus has dialled."""
        link = self._new_link(session, address, expected)
        link.begin()
        return link

    def accept(self, session: GsbSession, hello: pb.LinkHello) -> None:
        """Begin a link on a connection whose first packet asks for one. Raises `BadFrame`."""
        if self._is_stopping or len(self.links) + len(self._unproved) >= self._limits.max_links:
            raise BadFrame(TOO_MANY_LINKS)
        self._new_link(session).accept(hello)

    def on_up(self, link: Link) -> None:
        """Use a link whose handshake is done. Raises `BadFrame` if it must not be used."""
        self._unproved.pop(link, None)
        peer = link.session.connection.pipe.peer
        if link.node_id == self.node_id:
            if link.instance != self._instance:
                self._raise_duplicate(self.node_id, f"this node and {peer}")
            raise BadFrame(OWN_NODE)
        other = self.links.get(link.node_id)
        if other is not None:
            self._choose(link, other, peer)
        self.links[link.node_id] = link
        link.is_up = True
        link.announcements_left = self._limits.max_nodes + ANNOUNCEMENTS_PER_S
        session = link.session
        session.caller_name = link.node_id.encode()
        self._broker.log.info("link is up", node=link.node_id, peer=peer)
        link.ping()
        self._send(link, self.topology.announcements)
        self.announce()

    def on_lost(self, link: Link) -> None:
        """Forget a link whose connection has ended."""
        self._unproved.pop(link, None)
        if self.links.get(link.node_id) is link:
            del self.links[link.node_id]
            self._broker.log.warning("link is down", node=link.node_id, address=link.address)
            self.announce()

    def stop(self) -> None:
        """Announce that this node leaves. The broker ends the connections."""
        self._is_stopping = True
        self.announce()
        self._flood()

    def tick(self, now_s: float) -> None:
        """Ping links, end silent ones, repeat the announcement, forget silent nodes."""
        for link in list(self._unproved):
            if now_s - link.began_s > HANDSHAKE_TIMEOUT_S:
                self._broker.cut(link.session.connection, LINK_TIMEOUT)
        is_ping_due = now_s - self._pinged_s >= PING_S
        if is_ping_due:
            self._pinged_s = now_s
        for link in list(self.links.values()):
            allowed = link.announcements_left + ANNOUNCEMENTS_PER_S
            link.announcements_left = min(allowed, self._limits.max_nodes + ANNOUNCEMENTS_PER_S)
            if now_s - link.session.heard_s > SILENT_S:
                self._broker.cut(link.session.connection, LINK_TIMEOUT)
            elif is_ping_due:
                link.ping()
        if now_s - self._announced_s >= REFRESH_S:
            self.announce()
        for node in self.topology.expire(now_s):
            self._signer.forget(node)
            self._on_paths_changed()

    def _new_link(self, session: GsbSession, address: str = "", expected: str = "") -> Link:
        digest = session.connection.pipe.certificate_digest
        handshake = LinkHandshake(self._key, self._instance, digest, expected)
        link = Link(self, session, handshake, address)
        self._unproved[link] = None
        return link

    def _choose(self, link: Link, other: Link, peer: str) -> None:
        """Keep one of two links with one node. Raises `BadFrame` to refuse the new one."""
        if link.instance != other.instance:
            before = other.session.connection.pipe.peer
            self._raise_duplicate(link.node_id, f"{before} and {peer}")
            raise BadFrame(DUPLICATE_NODE)
        # Both nodes have dialled: both keep the link that the node with the lower id dialled.
        if link.is_dialled == other.is_dialled or link.is_dialled != (self.node_id < link.node_id):
            raise BadFrame(DUPLICATE_LINK)
        self._broker.close(other.session.connection, DUPLICATE_LINK)
        self.calls.leave(other.session)

    def _raise_duplicate(self, node: str, peers: str) -> None:
        text = f"two nodes have the id {node}: {peers}; give one of them a new key"
        self._broker.alarms.raise_alarm(ALARM, node, text)

    # --- announcements

    def announce(self) -> None:
        """Announce the present links of this node."""
        self._announced_s = self.now_s()
        self._sequence += 1
        links = () if self._is_stopping else tuple(sorted(self.links)[:MAX_NEIGHBOURS])
        own = Announcement.make(self._key, self._instance, self._sequence, links)
        self.topology.set_own(own)
        self._on_paths_changed()
        self._schedule_flood(self.node_id, None)

    def on_announce(self, link: Link, message: pb.Announce) -> None:
        """Keep the newer announcements and pass them on. Raises `BadFrame`."""
        link.announcements_left -= len(message.announcements)
        if link.announcements_left < 0:
            raise BadFrame(ANNOUNCEMENT_FLOOD)
        has_news = False
        for encoded in message.announcements:
            # Most announcements arrive over several links; a signature is checked once.
            if not self.topology.is_newer(node_id_of(encoded.public_key), encoded.sequence):
                continue
            try:
                announcement = Announcement.decode(encoded)
            except MalformedRequest:
                raise BadFrame(BAD_ANNOUNCEMENT) from None
            match self.topology.offer(announcement, self.now_s()):
                case Novelty.NEWER:
                    has_news = True
                    self._schedule_flood(announcement.node_id, link)
                case Novelty.OWN:
                    self._on_own_announced(announcement)
                case Novelty.TOO_MANY:
                    self._broker.counters.count("refused", "max_nodes")
        if has_news:
            self._on_paths_changed()

    def _on_own_announced(self, announcement: Announcement) -> None:
        """Announce with a higher sequence: the network believes the newest."""
        if announcement.neighbours:
            ends = ", ".join(announcement.neighbours)
            self._raise_duplicate(self.node_id, f"this node and one that is linked to {ends}")
        self._sequence = max(self._sequence, announcement.sequence)
        self.announce()

    def _schedule_flood(self, node: str, source: Link | None) -> None:
        self._to_flood[node] = source
        if not self._is_flood_scheduled:
            self._is_flood_scheduled = True
            self._timers.call_later(FLOOD_DELAY_S, self._flood)

    def _flood(self) -> None:
        self._is_flood_scheduled = False
        news, self._to_flood = self._to_flood, {}
        current = {one.node_id: one for one in self.topology.announcements}
        for link in self.links.values():
            nodes = [node for node, source in news.items() if source is not link]
            self._send(link, [current[node] for node in nodes if node in current])

    def _send(self, link: Link, announcements: list[Announcement]) -> None:
        for at in range(0, len(announcements), MAX_ANNOUNCED):
            some = [one.encode() for one in announcements[at : at + MAX_ANNOUNCED]]
            link.session.send_packet(pb.Packet(announce=pb.Announce(announcements=some)))

    def _on_paths_changed(self) -> None:
        for link in self.links.values():
            link.forget_nodes()
        self.calls.services.invalidate_routes()

    # --- calls

    def route(self, node: str) -> Service | ServiceStatus:
        """Return the link towards a node, as a service, or the refusal of a call to it."""
        path = self.topology.path_to(node)
        link = None if path is None else self.links.get(path.via)
        if link is not None:
            return link.service_for(node)
        if self.topology.was_known(node):
            return ServiceStatus(StatusCode.UNAVAILABLE, f"node {node} cannot be reached")
        return ServiceStatus(StatusCode.NOT_FOUND, f"unknown node {node}")

    def send_call(self, call: OpenCall, data: bytes) -> None:
        """Send a call of this node over its link."""
        target = self.topology.get(call.service.id)
        assert target is not None  # there is a path to it
        if len(data) + RELAY_BYTES > self._limits.max_packet_bytes:
            text = "the call is too large for a link"
            self.calls.fail(call, StatusCode.TOO_LARGE, text, cancel=False)
            return
        message = pb.RelayCall(
            request_id=call.id.decode(),
            data=data,
            address=call.address.decode(),
            hops=1,
            deadline_ms=max(1, int(call.deadline_s * 1000)),
            free_partials=call.free_partials,
            free_bytes=call.free_bytes,
        )
        try:
            self._signer.sign(message, target)
        except ValueError:
            text = f"node {call.service.id} has announced an invalid key"
            self.calls.fail(call, StatusCode.UNAVAILABLE, text, cancel=False)
            return
        call.endpoint.send_packet(pb.Packet(relay_call=message))

    def relay(self, link: Link, message: pb.RelayCall) -> None:
        """Open a call that another bus sends: to a service of this node, or to the next link."""
        self._check_form(message)
        session, request_id = link.session, message.request_id.encode()
        address, size = message.address.encode(), len(message.data)
        refusal = self.calls.check_request(session, request_id)
        route = refusal or self._find_route(link, message)
        if route is PING:
            session.send_reply(request_id, StatusCode.OK, 0, message.data)
            return
        if isinstance(route, ServiceStatus):
            self.calls.refuse(session, request_id, address, size, route)
            return
        call = self.calls.open_call(session, route, request_id, size, message.deadline_ms / 1000)
        call.free_partials, call.free_bytes = message.free_partials, message.free_bytes
        if call.endpoint.is_link:
            message.request_id = call.id.decode()
            message.hops += 1
            call.endpoint.send_packet(pb.Packet(relay_call=message))
        else:
            node = f"0x{message.origin.hex()}"
            call.origin = Identity(node=node)
            call.endpoint.send_call(call, message.data, node.encode())

    def on_call_end(self, call: OpenCall, code: int) -> None:
        """Account for a call of another node to a service of this one."""
        node = call.origin.node if call.origin else ""
        account = self._accounts.get(node)
        if account is None:
            if len(self._accounts) >= self._limits.max_nodes:
                del self._accounts[next(iter(self._accounts))]
            account = self._accounts[node] = NodeAccount()
        account.calls += 1
        account.failures += code != StatusCode.OK
        account.request_bytes += call.request_bytes
        account.reply_bytes += call.reply_bytes

    def _check_form(self, message: pb.RelayCall) -> None:
        has_form = (
            len(message.origin) == len(message.target) == ID_BYTES
            and 0 < message.hops <= MAX_HOPS
            and message.deadline_ms > 0
            and 0 < message.free_partials <= 1 << 16
            and 0 < message.free_bytes <= MAX_FREE_BYTES
        )
        if not has_form:
            raise BadFrame(BAD_RELAY)

    def _find_route(self, link: Link, message: pb.RelayCall) -> Route | ServiceStatus:
        target = f"0x{message.target.hex()}"
        try:
            name, node = parse_address(message.address)
        except MalformedRequest as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if node is not None:
            return ServiceStatus(StatusCode.BAD_REQUEST, "the address of a relayed call has a node")
        if target == self.node_id:
            origin = f"0x{message.origin.hex()}"
            announced = self.topology.get(origin)
            if announced is None or not self._signer.check(message, announced):
                self._broker.counters.count("refused", "forged_call")
                return ServiceStatus(StatusCode.DENIED, "the call is not signed by its node")
            if name == PUBLIC_PING:
                return PING
            found = self.calls.services.route_network_call(Identity(node=origin), name)
        elif message.hops >= MAX_HOPS:
            return ServiceStatus(StatusCode.UNAVAILABLE, f"node {target} is too far away")
        else:
            onward = self.route(target)
            if isinstance(onward, ServiceStatus):
                return onward
            if onward.endpoint is link.session:
                return ServiceStatus(StatusCode.UNAVAILABLE, f"no way to {target} but back")
            found = Route(onward, name.encode())
        if isinstance(found, Route) and not self.calls.pressure.has_room(found.service.endpoint):
            return ServiceStatus(StatusCode.UNAVAILABLE, "the way to the service is full")
        return found

    # --- statistics

    def describe(self) -> dict[str, Any]:
        """The answer of `sys/nodes`."""
        nodes = []
        for node, path in sorted(self.topology.paths().items()):
            link = self.links.get(path.via)
            trip_s = link.round_trip_s if link is not None else None
            nodes.append(
                {
                    "id": node,
                    "hops": path.hops,
                    "via": path.via,
                    "link_ms": None if trip_s is None else round(trip_s * 1000, 3),
                }
            )
        return {"id": self.node_id, "nodes": nodes}

    def stats(self) -> dict[str, Any]:
        return {
            "node": self.node_id,
            "links": len(self.links),
            "nodes": len(self.topology.paths()),
            "callers": {
                node: {
                    "calls": one.calls,
                    "failures": one.failures,
                    "request_bytes": one.request_bytes,
                    "reply_bytes": one.reply_bytes,
                }
                for node, one in self._accounts.items()
            },
        }
