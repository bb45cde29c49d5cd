"""Freud: ephemeral topics on a Unix socket, read at each subscriber's own pace.

    from polybus import freud

    async with freud.connect() as client: ...          # asyncio
    with freud.blocking.connect() as client: ...       # plain code

The names below are loaded at first use, so that the server, which needs only
the codec, and `polybus --help` do not pay for the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.dialects.freud import blocking
    from polybus.dialects.freud.client import Client, connect
    from polybus.dialects.freud.codec import Code
    from polybus.dialects.freud.options import ClientOptions
    from polybus.dialects.freud.subscription import Subscription
    from polybus.kernel.freud_client import Record

__all__ = [
    "Client",
    "ClientOptions",
    "Code",
    "Record",
    "Subscription",
    "blocking",
    "connect",
]

_HERE = "polybus.dialects.freud"
_LAZY = {
    "Client": f"{_HERE}.client",
    "ClientOptions": f"{_HERE}.options",
    "Code": f"{_HERE}.codec",
    "Record": "polybus.kernel.freud_client",
    "Subscription": f"{_HERE}.subscription",
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
