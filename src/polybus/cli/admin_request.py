"""Requests to the running bus over its admin socket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from polybus.server.admin_client import ask, ask_pages, default_path


def ask_admin(verb: str, admin: str | None, **keys: Any) -> Any:
    """Send one request. Returns the reply.

    `admin` is a path, or the address that `polybus serve` prints; None is the default path.
    Raises NotConnected if no bus answers.
    """
    return ask(_path(admin), verb, **keys)


def ask_admin_pages(verb: str, field: str, admin: str | None, **keys: Any) -> list[Any]:
    """Send requests until the last page, as `ask_admin`. Returns the rows of all pages."""
    return ask_pages(_path(admin), verb, field, **keys)


def _path(admin: str | None) -> Path:
    return Path(admin.removeprefix("unix:")) if admin else default_path(os.environ)
