"""polybus: one message bus, five dialects, one store, and Spark on top.

This is the small public face. A dialect's client is a lazy name here, as is `native`:

    from polybus import rqueue

imports polybus.dialects.rqueue, and nothing of the other dialects; `import
polybus` alone imports only the tree of errors, so that it costs next to nothing.
"""

from __future__ import annotations

from polybus.errors import PolybusError
from polybus.lazy_exports import lazy_exports

# True for type checkers only. `typing` itself would be most of this import's cost.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from polybus import native
    from polybus.dialects import fdq, freud, gsb, pirate, rqueue

__all__ = ["PolybusError", "__version__", "fdq", "freud", "gsb", "native", "pirate", "rqueue"]

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_exports(
    __name__,
    {},
    modules={
        "fdq": ".dialects.fdq",
        "freud": ".dialects.freud",
        "gsb": ".dialects.gsb",
        "native": ".native",
        "pirate": ".dialects.pirate",
        "rqueue": ".dialects.rqueue",
    },
)
