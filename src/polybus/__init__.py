"""polybus: one message bus, five dialects, one store, and Spark on top.

The public API. The client of each dialect is a lazy name, as is `native`:

    from polybus import rqueue

imports polybus.dialects.rqueue, and none of the other dialects. `import polybus` alone
imports only the tree of errors and lists the folder of the dialects.
"""

from __future__ import annotations

import os

from polybus.errors import PolybusError
from polybus.lazy_exports import lazy_exports

# True for type checkers only. Importing `typing` would be most of the cost of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from polybus import native as native
    from polybus.dialects import fdq as fdq
    from polybus.dialects import freud as freud
    from polybus.dialects import gsb as gsb
    from polybus.dialects import pirate as pirate
    from polybus.dialects import rqueue as rqueue

__version__ = "0.1.0"

_FOLDER = os.path.join(__path__[0], "dialects")  # noqa: PTH118 - pathlib would double the cost
# A dialect is its folder; a deleted folder must leave no name behind.
_DIALECTS = [
    name
    for name in sorted(os.listdir(_FOLDER))  # noqa: PTH208
    if os.path.isfile(os.path.join(_FOLDER, name, "__init__.py"))  # noqa: PTH113, PTH118
]

__all__ = ["PolybusError", "__version__", *sorted(["native", *_DIALECTS])]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {},
    modules={"native": ".native", **{name: f".dialects.{name}" for name in _DIALECTS}},
)
