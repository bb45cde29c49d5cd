"""The folder of a bus's Unix sockets, for the server and for clients.

<runtime>   $XDG_RUNTIME_DIR/polybus; without it /run/polybus for root,
            else polybus-<uid> in the temp folder
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT_UID = 0
ROOT_RUNTIME = Path("/run/polybus")


def runtime_folder(environ: Mapping[str, str], uid: int) -> Path:
    """Return the folder of the sockets of a bus that this user runs."""
    given = environ.get("XDG_RUNTIME_DIR")
    if given:
        return Path(given) / "polybus"
    if uid == ROOT_UID:
        return ROOT_RUNTIME
    return Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"polybus-{uid}"


def find_socket(name: str, environ: Mapping[str, str]) -> Path:
    """Return the socket of this user's bus, or that of root's bus if there is none."""
    own = runtime_folder(environ, os.getuid()) / name
    shared = ROOT_RUNTIME / name
    return shared if not _is_there(own) and _is_there(shared) else own


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no permission, or the path is too long
        return False
