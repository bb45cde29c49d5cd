"""polybus: one message bus, five dialects, one store, and Spark on top.

This is the small public face. A dialect's client is a lazy name here, as is `native`:

    from polybus import rqueue

imports polybus.dialects.rqueue, and nothing of the other dialects; `import
polybus` alone imports only the tree of errors, so that it costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from polybus.errors import PolybusError

# True for type checkers only. `typing` itself would be most of this import's cost.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from polybus import native
    from polybus.dialects import fdq, freud, gsb, pirate, rqueue

__all__ = ["PolybusError", "__version__", "fdq", "freud", "gsb", "native", "pirate", "rqueue"]

__version__ = "0.1.0"

# Public name → the module that its first use imports.
_LAZY = {
    "fdq": "polybus.dialects.fdq",
    "freud": "polybus.dialects.freud",
    "gsb": "polybus.dialects.gsb",
    "native": "polybus.native",
    "pirate": "polybus.dialects.pirate",
    "rqueue": "polybus.dialects.rqueue",
}


def __getattr__(name: str) -> ModuleType:
    if name not in _LAZY:
        raise AttributeError(f"module 'polybus' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    globals()[name] = module  # from now on a plain attribute
    return module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
