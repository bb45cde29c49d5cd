"""Where the sockets of a bus are: the server makes them there, clients look there.

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
    """Where the sockets are, for a bus of this user."""
    given = environ.get("XDG_RUNTIME_DIR")
    if given:
        return Path(given) / "polybus"
    if uid == ROOT_UID:
        return ROOT_RUNTIME
    return Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"polybus-{uid}"


def find_socket(name: str, environ: Mapping[str, str]) -> Path:
    """The socket of this user's bus; if there is none, that of the machine's, root's."""
    own = runtime_folder(environ, os.getuid()) / name
    shared = ROOT_RUNTIME / name
    return shared if not _is_there(own) and _is_there(shared) else own


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # not ours to look into, or too long for a path
        return False
