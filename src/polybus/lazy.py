"""Public names of a package that are loaded at their first use.

So the server, which needs only the codec of a dialect, and `polybus --help` do not pay for
its client. A package says where its names are, relative to itself or not:

    __all__ = ["Client", "blocking"]
    __getattr__, __dir__ = lazy(__name__, {"Client": ".client", "blocking": ".blocking"})

A module that is called like the name is meant itself. Type checkers read imports under
`if TYPE_CHECKING`.
"""

from __future__ import annotations

import sys
from importlib import import_module

# True for type checkers only. `typing` itself would be most of this import's cost.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package takes as `__getattr__` and `__dir__`."""

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        module = import_module(place, package)
        value = module if place.endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)  # from now on a plain attribute
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return load, names
