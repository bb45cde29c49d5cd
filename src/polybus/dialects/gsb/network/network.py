"""The network of this node: its links, the nodes beyond them, and the calls between nodes.

A call to another node is a call whose service is a link:

    caller ──▶ this bus ──relay_call──▶ bus B ──relay_call──▶ bus C ──call_request──▶ service
       ◀──────────────────────────── call_reply, hop by hop ────────────────────────────

Each bus has the call in its tables, so each of them ends it exactly once: a link that breaks is a
service that went away, and a cancel, a deadline and credits travel along the same way.

The origin signs the call for its target (call_key.pyx), which decides by its own rules whether
the calling node may call the service. Nodes between them relay and decide nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network import node_rules
from polybus.dialects.gsb.network.announcement import MAX_NEIGHBOURS, Announcement
from polybus.dialects.gsb.network.call_keys import CallKeys
from polybus.dialects.gsb.network.link import Link
from polybus.dialects.gsb.network.link_handshake import LinkHandshake
from polybus.dialects.gsb.network.node_key import node_id_of
from polybus.dialects.gsb.network.topology import REFRESH_S, Novelty, Topology
from polybus.dialects.gsb.server.call_table import CallingNode
from polybus.dialects.gsb.server.service_registry import ServiceStatus
from polybus.dialects.gsb.service_address import PUBLIC_ACL, PUBLIC_CHANNEL, PUBLIC_PING, StatusCode
from polybus.errors import BadFrame, MalformedRequest
from polybus.model.identity import Identity
from polybus.model.limits import KIB

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.timers import Timers
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.network.channels import Channels
    from polybus.dialects.gsb.network.node_key import NodeKey
    from polybus.dialects.gsb.server.call_router import CallRouter
    from polybus.dialects.gsb.server.call_table import OpenCall, Route, Service
    from polybus.dialects.gsb.server.session import GsbSession

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNPROVED, MAX_HOST_UNPROVED = 256, 16  # links in their handshake: of all, of one host
PING_S = 5.0
SILENT_S = 15.0  # a link that is silent for this long is broken
FLOOD_DELAY_S = 0.01  # announcements of this time travel together
MAX_ANNOUNCED = 32  # announcements in one packet
# Of one packet: below the lowest `max_packet_bytes`, since that of the other bus is unknown.
MAX_ANNOUNCE_BYTES = 3 * KIB
ANNOUNCEMENTS_PER_S = 200.0  # of one link; a signature takes some 150 µs to check
MAX_PING_BYTES = 1024

# Reasons for which a link is refused or closed. They are names of counters.
OWN_NODE = "own_node"
DUPLICATE_LINK = "duplicate_link"
DUPLICATE_NODE = "duplicate_node"
TOO_MANY_LINKS = "max_links"
NOT_ALLOWED = "link_not_allowed"
BAD_ANNOUNCEMENT = "bad_announcement"
ANNOUNCEMENT_FLOOD = "announcement_flood"
LINK_TIMEOUT = "link_timeout"
ALARM = "duplicate_node"
CHALLENGE_S = 2.0  # for a sign of life
CLEAR_S = 60.0  # nodes dial again after 10 s at most
BUILT_IN_SERVICES = frozenset({PUBLIC_PING.encode(), PUBLIC_ACL.encode()})


def host_of(session: GsbSession) -> str:
    """Return the peer's address without its port."""
    return session.connection.pipe.peer.rpartition(":")[0]


class Network:
    calls: CallRouter
    channels: Channels
    rules: node_rules.NodeRules | None = None  # of a bus whose rules can be changed

    def __init__(self, broker: Broker, limits: GsbLimits, timers: Timers, key: NodeKey) -> None:
        self._broker = broker
        self._limits = limits
        self._timers = timers
        self._key = key
        self.node_id = key.node_id
        self._own = bytes.fromhex(key.node_id[2:])
        self.now_s = broker.now_s
        self._instance = random.SystemRandom().getrandbits(63)
        self.topology = Topology(key.node_id, limits.max_nodes)
        self._keys = CallKeys(key, self._instance)
        self._sequence = broker.wall_ns() // 1_000_000  # above that of an earlier run
        self.links: dict[str, Link] = {}
        # Addresses that are dialled, and their nodes, if they are known.
        self.dialled: dict[str, str] = {}
        self._unproved: dict[Link, None] = {}
        self._duplicates: dict[str, float] = {}  # nodes with the alarm, and when it was last seen
        self._to_flood: dict[str, Link | None] = {}  # nodes, and the link that announced each
        self._is_flood_scheduled = False
        self._starved: dict[OpenCall, float] = {}  # calls without credit that block a service
        self._announced_s = self._pinged_s = broker.now_s()
        self._is_stopping = False

    def start(self, calls: CallRouter) -> None:
        """Begin to announce this node, whose calls the router routes."""
        self.calls = calls
        calls.table.node = self._own
        self._origins = calls.table.calling_nodes
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
        host = host_of(session)
        strangers = sum(host_of(link.session) == host for link in self._unproved)
        is_full = len(self._unproved) >= MAX_UNPROVED or strangers >= MAX_HOST_UNPROVED
        if self._is_stopping or is_full:
            raise BadFrame(TOO_MANY_LINKS)
        self._new_link(session).accept(hello)

    def has_room(self) -> bool:
        """Return whether `max_links` has a place for one more node.

        Each dialled address has one, also while its link is down: strangers must not take it.
        """
        nodes = {node for node, link in self.links.items() if not link.is_dialled}
        others = len(nodes.difference(self.dialled.values()))
        return others + len(self.dialled) < self._limits.max_links

    def check(self, link: Link) -> None:
        """Raise `BadFrame` if a link with this node must not be used. Ends the one it replaces."""
        peer = link.session.connection.pipe.peer
        if link.node_id == self.node_id:
            if link.instance != self._instance:
                self._raise_duplicate(self.node_id, f"this node and {peer}")
            raise BadFrame(OWN_NODE)
        other = self.links.get(link.node_id)
        if link.address in self.dialled:
            self.dialled[link.address] = link.node_id
        elif not link.is_dialled:
            self._check_accepted(link, is_new=other is None)
        if other is not None:
            if link.instance == other.instance:
                self._choose(link, other)
            else:
                self._challenge(link, other)
            self._broker.close(other.session.connection, DUPLICATE_LINK)
            self.calls.leave(other.session)

    def _check_accepted(self, link: Link, *, is_new: bool) -> None:
        """Raise `BadFrame` if the node that has dialled may not link, or finds no place."""
        allowed = self._limits.link_nodes
        if allowed and link.node_id not in allowed:
            peer = link.session.connection.pipe.peer
            self._broker.log.warning("link is not allowed", node=link.node_id, peer=peer)
            raise BadFrame(NOT_ALLOWED)
        if is_new and link.node_id not in self.dialled.values() and not self.has_room():
            raise BadFrame(TOO_MANY_LINKS)

    def on_up(self, link: Link) -> None:
        """Use a link whose handshake is done."""
        self._unproved.pop(link, None)
        peer = link.session.connection.pipe.peer
        self.links[link.node_id] = link
        link.session.is_link_up = True
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
        self._end_starved_calls(now_s)
        if now_s - self._announced_s >= REFRESH_S:
            self.announce()
        for node in [one for one, at_s in self._duplicates.items() if now_s - at_s > CLEAR_S]:
            del self._duplicates[node]
            self._broker.alarms.clear_alarm(ALARM, node)
        if self.topology.expire(now_s):
            self._on_paths_changed()

    def _end_starved_calls(self, now_s: float) -> None:
        """End calls of other nodes that stop a service for the calls of others.

        The bus does not read a service without credits while it waits for the credit of a call.
        """
        before, self._starved = self._starved, {}
        for session in [link.session for link in self.links.values()]:
            for service in list(session.waiters):
                calls = list(service.serving.values())
                if all(call.caller is session for call in calls):
                    continue
                for call in calls:
                    if call.caller is session and not call.free_left() and not call.credit:
                        self._starved[call] = before.get(call, now_s)
        since_s = now_s - self._limits.stuck_timeout_s
        for call in [one for one, began_s in self._starved.items() if began_s <= since_s]:
            self._broker.counters.count("refused", "call_without_credit")
            text = "the caller takes its replies too slowly"
            self.calls.fail(call, StatusCode.UNAVAILABLE, text, cancel=True)

    def _new_link(self, session: GsbSession, address: str = "", expected: str = "") -> Link:
        digest = session.connection.pipe.certificate_digest
        handshake = LinkHandshake(self._key, self._instance, digest, expected)
        link = Link(self, session, handshake, address)
        self._unproved[link] = None
        return link

    def _choose(self, link: Link, other: Link) -> None:
        """Keep one of two links with one process. Raises `BadFrame` to refuse the new one."""
        if link.is_dialled and other.is_dialled:
            raise BadFrame(DUPLICATE_LINK)  # two addresses of one node
        # If both nodes have dialled, both keep the link that the node with the lower id dialled.
        # If neither link was dialled here, the other bus dials again because its old one has ended.
        is_mutual = link.is_dialled != other.is_dialled
        if is_mutual and link.is_dialled != (self.node_id < link.node_id):
            raise BadFrame(DUPLICATE_LINK)

    def _challenge(self, link: Link, other: Link) -> None:
        """Decide between two processes with one key. Raises `BadFrame` to refuse the new one.

        The old one is asked for a sign of life. If it gives one, there are two. If it does not,
        the node has restarted, and the next try of the new process succeeds.
        """
        now_s = self.now_s()
        if other.challenged_s is None or now_s - other.challenged_s > CLEAR_S:
            other.challenged_s = now_s
            other.ping()
        elif other.session.heard_s > other.challenged_s:
            peers = [one.session.connection.pipe.peer for one in (other, link)]
            self._raise_duplicate(link.node_id, " and ".join(peers))
            other.challenged_s = None
        elif now_s - other.challenged_s > CHALLENGE_S:
            return
        raise BadFrame(DUPLICATE_NODE)

    def _raise_duplicate(self, node: str, peers: str) -> None:
        text = f"two nodes have the id {node}: {peers}; give one of them a new key"
        self._broker.alarms.raise_alarm(ALARM, node, text)
        self._duplicates[node] = self.now_s()

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
        if link.announcements_left < 0 or len(message.announcements) > MAX_ANNOUNCED:
            raise BadFrame(ANNOUNCEMENT_FLOOD)
        before, has_new_run = self.topology.paths(), False
        for encoded in message.announcements:
            # Most announcements arrive over several links; a signature is checked once.
            if not self.topology.is_newer(node_id_of(encoded.public_key), encoded.sequence):
                continue
            try:
                announcement = Announcement.decode(encoded)
            except MalformedRequest:
                raise BadFrame(BAD_ANNOUNCEMENT) from None
            kept = self.topology.get(announcement.node_id)
            has_new_run |= kept is not None and not kept.is_same_run(announcement)
            match self.topology.offer(announcement, self.now_s()):
                case Novelty.NEWER:
                    self._schedule_flood(announcement.node_id, link)
                case Novelty.OWN:
                    self._on_own_announced(announcement)
                case Novelty.TOO_MANY:
                    self._broker.counters.count("refused", "max_nodes")
        # Calls to a node that has restarted need another key.
        if has_new_run or self.topology.paths() != before:
            self._on_paths_changed()

    def _on_own_announced(self, announcement: Announcement) -> None:
        """Announce with a higher sequence: nodes keep the announcement with the highest one."""
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
        batch: list[pb.Announcement] = []
        size = 0
        for encoded in [one.encode() for one in announcements]:
            if batch and size + encoded.ByteSize() > MAX_ANNOUNCE_BYTES:
                link.session.send_packet(pb.Packet(announce=pb.Announce(announcements=batch)))
                batch, size = [], 0
            batch.append(encoded)
            size += encoded.ByteSize()
        if batch:
            link.session.send_packet(pb.Packet(announce=pb.Announce(announcements=batch)))

    def _on_paths_changed(self) -> None:
        for link in self.links.values():
            link.forget_nodes()
        for origin in self._origins.values():
            origin.key = None
        self.calls.services.invalidate_routes()

    # --- calls

    def route(self, node: str) -> Service | ServiceStatus:
        """Return the link towards a node, as a service, or the refusal of a call to it."""
        path, announced = self.topology.path_to(node), self.topology.get(node)
        link = None if path is None else self.links.get(path.via)
        if link is not None and announced is not None:
            try:
                return link.service_for(node, self._keys.key_for(announced))
            except ValueError:
                text = f"node {node} has announced an invalid key"
                return ServiceStatus(StatusCode.UNAVAILABLE, text)
        if self.topology.was_known(node):
            return ServiceStatus(StatusCode.UNAVAILABLE, f"node {node} cannot be reached")
        return ServiceStatus(StatusCode.NOT_FOUND, f"unknown node {node}")

    def find_calling_node(self, node: bytes) -> CallingNode | None:
        """Return a node that calls, with its key. Returns None if its announcement is unknown.

        The key is None if the node has announced an invalid one.
        """
        name = f"0x{node.hex()}"
        announced = self.topology.get(name)
        if announced is None:
            return None
        origin = self._origins.get(node)
        if origin is None:
            if len(self._origins) >= self._limits.max_nodes:
                del self._origins[next(iter(self._origins))]
            origin = self._origins[node] = CallingNode(Identity(node=name))
        try:
            origin.key = self._keys.key_for(announced)
        except ValueError:
            origin.key = None
        return origin

    def resolve_relayed(
        self, link: GsbSession, origin: CallingNode, address: bytes, request_id: bytes, data: bytes
    ) -> Route | None:
        """Return the route of a call by another node. Returns None if it is answered or refused."""
        route: Route | ServiceStatus
        if address in BUILT_IN_SERVICES:
            self._call_built_in(link, address.decode(), request_id, origin, data)
            return None
        if address == PUBLIC_CHANNEL.encode():
            feed = self.channels.open_feed(origin, data)
            route = feed if isinstance(feed, ServiceStatus) else feed.route
        else:
            services = self.calls.services
            route = services.route_network_call(link, origin.identity, address)
        if isinstance(route, ServiceStatus):
            refusal = route._replace(origin=origin)
            self.calls.refuse(link, request_id, address, len(data), refusal)
            return None
        return route

    def resolve_target(
        self, link: GsbSession, target: bytes, address: bytes, request_id: bytes, size: int
    ) -> Route | None:
        """Return the route of a call to another node. Returns None if it is refused."""
        route = self.calls.services.route_relayed_call(link, target)
        if isinstance(route, ServiceStatus):
            self.calls.refuse(link, request_id, address, size, route)
            return None
        return route

    def _call_built_in(
        self, session: GsbSession, name: str, request_id: bytes, origin: CallingNode, data: bytes
    ) -> None:
        """Answer a call of another node to a service of the bus itself."""
        refusal = None
        if name == PUBLIC_PING and len(data) > MAX_PING_BYTES:
            text = f"a ping must have at most {MAX_PING_BYTES} bytes"
            refusal = ServiceStatus(StatusCode.TOO_LARGE, text)
        elif name == PUBLIC_PING:
            self.calls.answer(session, request_id, name, len(data), data, origin)
        elif self.rules is not None:
            refusal = self.rules.call(session, request_id, origin, data)
        else:
            refusal = ServiceStatus(StatusCode.NOT_FOUND, f"no service {name!r}")
        if refusal is not None:
            refusal = refusal._replace(origin=origin)
            self.calls.refuse(session, request_id, name.encode(), len(data), refusal)

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
                one.identity.node: {
                    "calls": one.account.calls,
                    "failures": one.account.failures,
                    "request_bytes": one.account.request_bytes,
                    "reply_bytes": one.account.reply_bytes,
                }
                for one in self._origins.values()
            },
        }
