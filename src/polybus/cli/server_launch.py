"""Start the server from a command without importing it.

Only `server.app` knows every part, and no module may import it, or that module would depend
on every part, too. So the command names it, as an entry point does, and resolves the name
when the server starts. This is the only place with that name.
"""

from __future__ import annotations

from importlib import import_module

from polybus.server.program import ServerPlan

APP = "polybus.server.app"


def launch(program: ServerPlan) -> int:
    """Run the bus until it is stopped. Returns the exit code."""
    code: int = import_module(APP).run(program)
    return code
