"""Requests to the running bus over its admin socket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from polybus.server.admin_client import ask, default_path


def ask_admin(verb: str, admin: str | None, **keys: Any) -> Any:
    """Send one request. Returns the reply.

    `admin` is a path, or the address that `polybus serve` prints; None is the default path.
    Raises NotConnected if no bus answers.
    """
    path = Path(admin.removeprefix("unix:")) if admin else default_path(os.environ)
    return ask(path, verb, **keys)
