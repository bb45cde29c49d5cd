"""Commands of other users. They need root, and a checkout that other users may enter."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


def _is_open(place: Path) -> bool:
    """Return True if every user may enter all parent folders."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in place.parents)


WHY = "needs root, and a checkout that other users may enter"
STRANGERS = pytest.mark.skipif(os.getuid() != 0 or not _is_open(Path(__file__)), reason=WHY)
