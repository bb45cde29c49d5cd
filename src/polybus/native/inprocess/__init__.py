"""A bus inside the process: `lmdb:PATH`, `memory:` and `memory:NAME`.

    with open_bus("lmdb:./data") as bus:
        bus.act("topic.list")

It has the methods of `native.Client` that FDQ needs, without a port. All handles of one URL
in a process share one bus, which closes with the last handle.
"""

from __future__ import annotations

from polybus.native.inprocess.inprocess_bus import open_bus
from polybus.native.inprocess.inprocess_client import InProcessClient

__all__ = ["InProcessClient", "open_bus"]
