"""GSB: services that register and call each other, over nng's PAIR protocol.

    from polybus import gsb

    async with gsb.connect() as bus: ...          # asyncio
    with gsb.blocking.connect() as bus: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.dialects.gsb import blocking
    from polybus.dialects.gsb.calling import Stream
    from polybus.dialects.gsb.client import Client, connect
    from polybus.dialects.gsb.listening import Broadcast, Subscription
    from polybus.dialects.gsb.options import ClientOptions
    from polybus.dialects.gsb.serving import Call
    from polybus.errors import ServiceFailed

__all__ = [
    "Broadcast",
    "Call",
    "Client",
    "ClientOptions",
    "ServiceFailed",
    "Stream",
    "Subscription",
    "blocking",
    "connect",
]

_HERE = "polybus.dialects.gsb"
_LAZY = {
    "Broadcast": f"{_HERE}.listening",
    "Call": f"{_HERE}.serving",
    "Client": f"{_HERE}.client",
    "ClientOptions": f"{_HERE}.options",
    "ServiceFailed": "polybus.errors",
    "Stream": f"{_HERE}.calling",
    "Subscription": f"{_HERE}.listening",
    "connect": f"{_HERE}.client",
}


def __getattr__(name: str) -> Any:
    if name == "blocking":
        return import_module(f"{_HERE}.blocking")
    if name not in _LAZY:
        raise AttributeError(f"module {_HERE!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
