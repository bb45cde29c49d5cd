"""Sabotages of access rules."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # Rules are listed, and have no effect.
    Patch(
        "no-rules",
        "bus/policy.py",
        "                self._tables.setdefault(verb, VerbTable()).add(one, bit)\n",
        "                pass\n",
    ),
]
