"""Registered service names, and the resolution of addresses.

A name belongs to the connection that registered it, until that connection unregisters it or
ends. Resolved addresses are cached per caller, until a name or a rule changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.dialects.gsb.server.call_table import Route, Service
from polybus.dialects.gsb.service_address import (
    BUILT_IN,
    NET,
    PUBLIC_CHANNEL,
    PUBLIC_PING,
    StatusCode,
    check_service_name,
    parse_address,
    resolve_service,
)
from polybus.errors import MalformedRequest
from polybus.model.access_rule import CALL, CREATE

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.dialects.gsb.limits import GsbLimits
    from polybus.dialects.gsb.network.network import Network
    from polybus.dialects.gsb.server.call_table import CallingNode, CallTable, OpenCall
    from polybus.dialects.gsb.server.session import GsbSession
    from polybus.model.identity import Identity

MAX_ROUTES = 1024  # cached per caller; the cache is cleared when it is full

NS_PER_MS = 1_000_000
PUBLIC = "public/"  # names that other nodes may see


def remote_name(node: str, name: str) -> bytes:
    """Return the name by which rules of this node judge calls to another node."""
    return f"net/{node}/{name}".encode()


class ServiceStatus(NamedTuple):
    """The code of a reply, and a message for people."""

    code: StatusCode
    message: str = ""
    # Of a call from another node whose signature is valid.
    origin: CallingNode | None = None


OK_STATUS = ServiceStatus(StatusCode.OK)


class ServiceRegistry:
    """All services of a bus, by name."""

    def __init__(
        self, broker: Broker, table: CallTable, limits: GsbLimits, network: Network
    ) -> None:
        self._broker = broker
        self._table = table
        self._limits = limits
        self._network = network
        self._by_name: dict[str, Service] = {}
        broker.policy.on_change(self.invalidate_routes)

    def __len__(self) -> int:
        return len(self._by_name)

    def describe(self) -> list[dict[str, Any]]:
        """Return all services, sorted by name. `sys/services` replies with it."""
        return [
            {
                "id": service.id,
                "since_ms": service.since_ms,
                "calls": service.calls,
                "pending": service.pending,
            }
            for _, service in sorted(self._by_name.items())
        ]

    def register(self, peer: GsbSession, name: str) -> ServiceStatus:
        try:
            check_service_name(name)
        except MalformedRequest as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if not self._broker.policy.allows(peer.connection.pipe.identity, CREATE, name.encode()):
            self._broker.count_refusal(peer.connection, "register_denied", name.encode())
            return ServiceStatus(StatusCode.DENIED, f"not allowed to register {name!r}")
        if name in self._by_name:
            return ServiceStatus(StatusCode.CONFLICT, f"{name!r} is already registered")
        if len(peer.services) >= self._limits.max_services:
            self._broker.count_refusal(peer.connection, "max_services", name.encode())
            return ServiceStatus(
                StatusCode.DENIED, f"max_services ({self._limits.max_services}) is reached"
            )
        service = Service(name, peer, self._broker.wall_ns() // NS_PER_MS)
        self._by_name[name] = peer.services[name] = service
        self.invalidate_routes()
        return OK_STATUS

    def unregister(self, peer: GsbSession, name: str) -> ServiceStatus:
        """Release a name. Open calls continue."""
        if peer.services.pop(name, None) is None:
            return ServiceStatus(
                StatusCode.NOT_FOUND, f"{name[:100]!r} is not registered by this connection"
            )
        del self._by_name[name]
        self.invalidate_routes()
        return OK_STATUS

    def unregister_all(self, peer: GsbSession) -> None:
        """Release all names of a connection."""
        for name in peer.services:
            del self._by_name[name]
        if peer.services:
            peer.services.clear()
            self.invalidate_routes()

    def find_denied(self) -> list[Service]:
        """Return the services whose connections may no longer register their names."""
        allows = self._broker.policy.allows
        return [
            service
            for service in self._by_name.values()
            if not allows(service.endpoint.connection.pipe.identity, CREATE, service.id.encode())
        ]

    def may_call(self, call: OpenCall) -> bool:
        """Return whether the rules still allow an open call."""
        if call.caller.is_link and call.origin is None:
            return True  # relayed to another node, which decides
        if PUBLIC_CHANNEL in (call.service.id, call.address.decode()):
            return True  # a subscription: channels.py decides
        identity, allows = call.caller.connection.pipe.identity, self._broker.policy.allows
        if call.endpoint.is_link:
            return allows(identity, CALL, remote_name(call.service.id, call.address.decode()))
        return self._allows_call(call.origin or identity, call.address.decode(), call.service)

    def route(self, peer: GsbSession, address: bytes) -> Route | ServiceStatus | str:
        """Resolve an address: a route, a refusal, or the name of a built-in service."""
        try:
            name, node = parse_address(address.decode())
        except (MalformedRequest, UnicodeDecodeError) as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if node is not None and node != self._network.node_id:
            return self._route_remote(peer, address, node, name)
        is_built_in = name.partition("/")[0] == BUILT_IN or name == PUBLIC_PING
        service = None if is_built_in else resolve_service(self._by_name, name)
        if service is None and not is_built_in:
            return ServiceStatus(StatusCode.NOT_FOUND, f"no service {name!r}")
        if not self._allows_call(peer.connection.pipe.identity, name, service):
            self._broker.count_refusal(peer.connection, "call_denied", name.encode())
            return ServiceStatus(StatusCode.DENIED, f"not allowed to call {name!r}")
        if service is None:
            return name
        return self._cache_route(peer, address, Route(service, name.encode()))

    def route_network_call(
        self, peer: GsbSession, origin: Identity, address: bytes
    ) -> Route | ServiceStatus:
        """Resolve an address that another node calls. It sees only names under `public/`."""
        try:
            name, node = parse_address(address.decode())
        except (MalformedRequest, UnicodeDecodeError) as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if node is not None:
            return ServiceStatus(StatusCode.BAD_REQUEST, "the address of a relayed call has a node")
        service = resolve_service(self._by_name, name)
        if service is None or not service.id.startswith(PUBLIC):
            return ServiceStatus(StatusCode.NOT_FOUND, f"no service {name!r}")
        if not self._allows_call(origin, name, service):
            self._broker.counters.count("refused", "network_call_denied")
            return ServiceStatus(StatusCode.DENIED, f"not allowed to call {name!r}")
        key = origin.node.encode() + address
        return self._cache_route(peer, key, Route(service, name.encode()))

    def route_relayed_call(self, peer: GsbSession, target: bytes) -> Route | ServiceStatus:
        """Find the next link of a call between two other nodes. The route has no address."""
        node = f"0x{target.hex()}"
        link = self._network.route(node)
        if isinstance(link, ServiceStatus):
            return link
        if link.endpoint is peer:
            return ServiceStatus(StatusCode.UNAVAILABLE, f"no way to {node} but back")
        return self._cache_route(peer, target, Route(link, b""))

    def _route_remote(
        self, peer: GsbSession, address: bytes, node: str, name: str
    ) -> Route | ServiceStatus:
        """Resolve an address of another node: the route is the link towards it."""
        if name == PUBLIC_CHANNEL:
            text = f"subscribe to the topic {NET}{node}/… instead"
            return ServiceStatus(StatusCode.BAD_REQUEST, text)
        judged = remote_name(node, name)
        if not self._broker.policy.allows(peer.connection.pipe.identity, CALL, judged):
            self._broker.count_refusal(peer.connection, "call_denied", judged)
            return ServiceStatus(StatusCode.DENIED, f"not allowed to call {address.decode()!r}")
        link = self._network.route(node)
        if isinstance(link, ServiceStatus):
            return link
        return self._cache_route(peer, address, Route(link, name.encode()))

    def _allows_call(self, identity: Identity, name: str, service: Service | None) -> bool:
        """Return whether the rules allow a call. `service` is None for one of the bus itself."""
        # A rule may name the service or one of its methods; both must allow the call.
        judged = {name, service.id if service else name}
        return all(self._broker.policy.allows(identity, CALL, one.encode()) for one in judged)

    def _cache_route(self, peer: GsbSession, address: bytes, route: Route) -> Route:
        """Keep a route for the next call. call_table.pyx looks it up, and drops old ones."""
        if len(peer.routes) >= MAX_ROUTES:
            peer.routes.clear()
        peer.routes[address] = route
        return route

    def invalidate_routes(self) -> None:
        """Make every connection resolve its addresses again, at its next call."""
        self._table.generation += 1
