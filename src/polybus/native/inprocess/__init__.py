"""A bus inside the process: `lmdb:PATH`, `memory:` and `memory:NAME`.

    with open_bus("lmdb:./data") as bus:
        bus.act("topic.list")

It has the face of `native.Client`, as far as FDQ needs it, without a port in between.
All who open one URL in a process share one bus; it ends with the last who closes it.
"""

from __future__ import annotations

from polybus.native.inprocess.inprocess_bus import open_bus
from polybus.native.inprocess.inprocess_client import InProcessClient

__all__ = ["InProcessClient", "open_bus"]
