"""Sabotages of the shares of callers in bounded tables."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # One account may take a whole table, except for the reserve.
    Patch(
        "share-ignored",
        "bus/shares.py",
        "            if self._held.get(account, 0) + amount > share:\n",
        "            if False:\n",
    ),
    # libzmq may take every descriptor.
    Patch(
        "no-descriptor-reserve",
        "server/process_tuning.py",
        "        descriptor_reserve.keep(start)\n",
        "        pass\n",
    ),
]
