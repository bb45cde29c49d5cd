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
]
