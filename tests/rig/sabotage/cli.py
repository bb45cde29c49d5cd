"""Sabotages of the command line."""

from __future__ import annotations

from tests.rig.patching import Patch

SABOTAGES = [
    # A terminal gets the bytes of peers as they are.
    Patch(
        "terminal-filter-off",
        "cli/main.py",
        "    terminal.protect_terminal()\n",
        "",
    ),
]
