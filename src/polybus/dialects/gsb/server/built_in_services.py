"""The bus's own services, under `sys/`: answered at once, by the bus itself.

sys/services   every registered name: {id, since_ms, calls, pending}
sys/ping       the given value back
sys/stats      the counters of the bus
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from polybus.dialects.gsb.server.service_registry import ServiceRegistry


class BuiltInServices:
    def __init__(self, services: ServiceRegistry, stats: Callable[[], dict[str, Any]]) -> None:
        self._services = services
        self._table: dict[str, Callable[[bytes], bytes]] = {
            "sys/services": lambda _: msgpack.packb(self._list()),
            "sys/ping": lambda data: data,
            "sys/stats": lambda _: msgpack.packb(stats()),
        }

    def answer(self, name: str, data: bytes) -> bytes | None:
        """The data of the reply; None if there is no such service."""
        serve = self._table.get(name)
        return None if serve is None else serve(data)

    def _list(self) -> list[dict[str, Any]]:
        return [
            {
                "id": service.id,
                "since_ms": service.since_ms,
                "calls": service.calls,
                "pending": service.pending,
            }
            for service in self._services.all()
        ]
