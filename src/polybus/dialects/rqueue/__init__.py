"""rqueue: push publish/subscribe over TCP, fast.

    from polybus import rqueue

    async with rqueue.connect() as client: ...          # asyncio
    with rqueue.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.dialects.rqueue import blocking
    from polybus.dialects.rqueue.client import Client, connect
    from polybus.dialects.rqueue.options import ClientOptions
    from polybus.dialects.rqueue.parts import PartLimits
    from polybus.kernel.notifications import Message, NotificationBatch

__all__ = [
    "Client",
    "ClientOptions",
    "Message",
    "NotificationBatch",
    "PartLimits",
    "blocking",
    "connect",
]

_HERE = "polybus.dialects.rqueue"
_LAZY = {
    "Client": f"{_HERE}.client",
    "ClientOptions": f"{_HERE}.options",
    "Message": "polybus.kernel.notifications",
    "NotificationBatch": "polybus.kernel.notifications",
    "PartLimits": f"{_HERE}.parts",
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
