"""A bus inside the process: `lmdb:PATH`, `memory:` and `memory:NAME`.

    with open_bus("lmdb:./data") as bus:
        bus.act("topic.list")

The client is `native.Client`, which calls the port of the bus directly. All clients of one
URL in a process share one bus, which closes with the last client.
"""

from __future__ import annotations

from polybus.native.inprocess.inprocess_bus import open_bus

__all__ = ["open_bus"]
