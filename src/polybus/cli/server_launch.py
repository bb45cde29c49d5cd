"""Starting the server from a command, without depending on it.

`server.app` is the one file that knows everything, and nothing may import it:
whoever did would know everything, too. So the command names it, the way an
entry point does, and it is looked up at the moment it is to run. This is the
only place with that name.
"""

from __future__ import annotations

from importlib import import_module

from polybus.server.program import ServerPlan

APP = "polybus.server.app"


def launch(program: ServerPlan) -> int:
    """Run the bus until it is stopped. Returns the exit code."""
    code: int = import_module(APP).run(program)
    return code
