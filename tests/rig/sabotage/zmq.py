"""Sabotages of the ZeroMQ transport."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # Messages without an end, and answers that are not read, have no bound.
    Patch(
        "watch-off",
        "transports/zmq/memory_watch.py",
        "        if connection.cut():\n",
        "        if False:\n",
    ),
    # A listener that was closed still reads the events of its socket.
    Patch(
        "ticks-after-close",
        "dialects/pirate/server/router_listener.py",
        "        if self._monitor.closed:  # drained, while other listeners still drain\n",
        "        if False:\n",
    ),
]
