"""Freud: ephemeral topics on a Unix socket, read at each subscriber's own pace.

The names below are loaded at first use, so that `polybus --help` does not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.dialects.freud.codec import Code
    from polybus.kernel.freud_client import Record

__all__ = ["Code", "Record"]

_HERE = "polybus.dialects.freud"
_LAZY = {
    "Code": f"{_HERE}.codec",
    "Record": "polybus.kernel.freud_client",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {_HERE!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
