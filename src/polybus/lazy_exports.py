"""Public names of a package, loaded on first use.

The server needs only the codec of a dialect, and `polybus --help` needs none of it, so
neither should import the client. A package lists the modules of its names, and which names
are modules themselves:

    __all__ = ["Client", "blocking"]
    __getattr__, __dir__ = lazy(
        __name__, {"Client": ".client.client"}, modules={"blocking": ".client.blocking"}
    )

Type checkers read the imports under `if TYPE_CHECKING`.
"""

from __future__ import annotations

import sys
from importlib import import_module

# True for type checkers only. Importing `typing` would be most of the cost of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_exports(
    package: str, places: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package."""

    def load(name: str) -> Any:
        if modules and name in modules:
            value: Any = import_module(modules[name], package)
        elif name in places:
            value = getattr(import_module(places[name], package), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # a plain attribute from the next access on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *(modules or ())})

    return load, names
