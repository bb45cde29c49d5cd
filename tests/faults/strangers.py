"""Commands of other users: only root can be somebody else, and others must reach the checkout."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


def _is_open(place: Path) -> bool:
    """Whether anybody may come here: a clone in root's own folder is for root alone."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in place.parents)


WHY = "only root can be somebody else, and only in a checkout that others may enter"
STRANGERS = pytest.mark.skipif(os.getuid() != 0 or not _is_open(Path(__file__)), reason=WHY)
