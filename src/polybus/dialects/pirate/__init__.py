"""Pirate: durable topics on ZeroMQ; subscribers get everything they missed, once, in order.

    from polybus import pirate

    async with pirate.connect() as client: ...          # asyncio
    with pirate.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.dialects.pirate import blocking
    from polybus.dialects.pirate.asking import Fate
    from polybus.dialects.pirate.client import Client, connect
    from polybus.dialects.pirate.options import ClientOptions, Order
    from polybus.dialects.pirate.reading import Message
    from polybus.dialects.pirate.state import Outcome, Pending

__all__ = [
    "Client",
    "ClientOptions",
    "Fate",
    "Message",
    "Order",
    "Outcome",
    "Pending",
    "blocking",
    "connect",
]

_HERE = "polybus.dialects.pirate"
_LAZY = {
    "Client": f"{_HERE}.client",
    "ClientOptions": f"{_HERE}.options",
    "Fate": f"{_HERE}.asking",
    "Message": f"{_HERE}.reading",
    "Order": f"{_HERE}.options",
    "Outcome": f"{_HERE}.state",
    "Pending": f"{_HERE}.state",
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
