"""Registered names, and what an address means to a caller.

A name belongs to the connection that registered it, until that unregisters it or ends.
What an address was found to mean is remembered with the caller, until a name comes or
goes or the rules change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from polybus.dialects.gsb.server.call_table import Route, Service
from polybus.dialects.gsb.service_address import (
    BUILT_IN,
    StatusCode,
    check_service_name,
    parse_address,
)
from polybus.errors import MalformedRequest
from polybus.model.access_rule import CALL, CREATE

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.dialects.gsb.server.call_peer import CallPeer
    from polybus.dialects.gsb.server.call_table import Desk
    from polybus.model.limits import GsbLimits

MAX_ROUTES = 1024  # remembered for one caller; beyond that they are found anew

NS_PER_MS = 1_000_000


class ServiceStatus(NamedTuple):
    """A code, and for people what was wrong."""

    code: StatusCode
    message: str = ""


OK_STATUS = ServiceStatus(StatusCode.OK)


class ServiceRegistry:
    def __init__(self, broker: Broker, desk: Desk, limits: GsbLimits) -> None:
        self._broker = broker
        self._desk = desk
        self._limits = limits
        self._by_name: dict[str, Service] = {}
        broker.policy.on_change(self._invalidate_routes)

    def __len__(self) -> int:
        return len(self._by_name)

    def all(self) -> list[Service]:
        return sorted(self._by_name.values(), key=lambda service: service.id)

    def register(self, peer: CallPeer, name: str) -> ServiceStatus:
        try:
            check_service_name(name)
        except MalformedRequest as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if not self._broker.policy.allows(peer.party.pipe.identity, CREATE, name.encode()):
            self._broker.count_refusal(peer.party, "register_denied", name.encode())
            return ServiceStatus(StatusCode.DENIED, f"not allowed to register {name!r}")
        if name in self._by_name:
            return ServiceStatus(StatusCode.CONFLICT, f"{name!r} is registered already")
        if len(peer.services) >= self._limits.max_services:
            self._broker.count_refusal(peer.party, "max_services", name.encode())
            return ServiceStatus(
                StatusCode.DENIED, f"max_services is reached: {self._limits.max_services}"
            )
        service = Service(name, peer, self._broker.wall_ns() // NS_PER_MS)
        self._by_name[name] = peer.services[name] = service
        self._invalidate_routes()
        return OK_STATUS

    def unregister(self, peer: CallPeer, name: str) -> ServiceStatus:
        """Open calls go on to their end."""
        if peer.services.pop(name, None) is None:
            return ServiceStatus(
                StatusCode.NOT_FOUND, f"{name[:100]!r} is not registered by this connection"
            )
        del self._by_name[name]
        self._invalidate_routes()
        return OK_STATUS

    def unregister_all(self, peer: CallPeer) -> None:
        """All its names are free."""
        for name in peer.services:
            del self._by_name[name]
        if peer.services:
            peer.services.clear()
            self._invalidate_routes()

    def route(self, peer: CallPeer, address: bytes) -> Route | ServiceStatus | str:
        """Where a call goes; a text is the name of a service of the bus's own."""
        if peer.generation != self._desk.generation:
            peer.routes.clear()
            peer.generation = self._desk.generation
        found = peer.routes.get(address)
        return found if found is not None else self._find(peer, address)

    def _find(self, peer: CallPeer, address: bytes) -> Route | ServiceStatus | str:
        try:
            place = parse_address(address.decode())
        except (MalformedRequest, UnicodeDecodeError) as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if place.node is not None:
            return ServiceStatus(StatusCode.NOT_FOUND, f"node {place.node} is not known")
        built_in = place.service.partition("/")[0] == BUILT_IN
        service = None if built_in else self._resolve(place.service)
        if service is None and not built_in:
            return ServiceStatus(StatusCode.NOT_FOUND, f"no service {place.service!r}")
        if not self._can_call(peer, {place.service, service.id if service else place.service}):
            self._broker.count_refusal(peer.party, "call_denied", place.service.encode())
            return ServiceStatus(StatusCode.DENIED, f"not allowed to call {place.service!r}")
        if service is None:
            return place.service
        if len(peer.routes) >= MAX_ROUTES:
            peer.routes.clear()
        route = peer.routes[address] = Route(service, place.service.encode())
        return route

    def _resolve(self, name: str) -> Service | None:
        """The longest registered name at the front of this one."""
        while name:
            service = self._by_name.get(name)
            if service is not None:
                return service
            name = name.rpartition("/")[0]
        return None

    def _can_call(self, peer: CallPeer, names: set[str]) -> bool:
        """A rule may speak of the service, or of one of its methods."""
        who = peer.party.pipe.identity
        return all(self._broker.policy.allows(who, CALL, name.encode()) for name in names)

    def _invalidate_routes(self) -> None:
        self._desk.generation += 1
