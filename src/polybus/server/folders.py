"""The folders of a bus: where its sockets are, and where its data is.

    <runtime>   as in model/socket_path.py, where clients look, too
    data        --data; else $XDG_STATE_HOME/polybus, ~/.local/state/polybus,
                or /var/lib/polybus for root

A folder that the bus creates is 0700, so only its user reaches its files; the
exception is root's runtime folder (0755), because a bus of root serves everyone
and its policy decides. A folder that is already there must belong to the bus's
user and be writable by no other: in a shared temp folder another user could have
created it first, and would then own the sockets.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping
from pathlib import Path

from polybus.errors import ConfigError
from polybus.model.socket_path import ROOT_UID

PRIVATE = 0o700
SHARED = 0o755
OTHERS_MAY_WRITE = 0o022

ROOT_DATA = Path("/var/lib/polybus")


def data_folder(environ: Mapping[str, str], uid: int) -> Path:
    """Where the data is unless `--data` says otherwise."""
    given = environ.get("XDG_STATE_HOME")
    if given:
        return Path(given) / "polybus"
    if uid == ROOT_UID:
        return ROOT_DATA
    home = environ.get("HOME")
    if not home:
        raise ConfigError("no data folder: neither $HOME nor $XDG_STATE_HOME is set; give --data")
    return Path(home) / ".local" / "state" / "polybus"


def socket_folder_mode(uid: int) -> int:
    """Everyone may look into root's folder and reach the sockets; only the user into others."""
    return SHARED if uid == ROOT_UID else PRIVATE


def socket_mode(uid: int) -> int:
    """Root's sockets are for everyone (the policy decides), another user's for that user."""
    return 0o666 if uid == ROOT_UID else 0o600


def prepare_runtime(folder: Path, uid: int) -> None:
    """Create `<runtime>`, or check the existing one. Its parent must exist."""
    what = "runtime folder"
    if not folder.parent.is_dir():
        raise ConfigError(f"{what} {folder}: there is no {folder.parent} (see $XDG_RUNTIME_DIR)")
    _prepare(folder, socket_folder_mode(uid), uid, what)


def prepare_data(folder: Path, uid: int) -> None:
    """Make the data folder with all above it, or check the one that is there."""
    what = "data folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what} {folder}: cannot be made: {error.strerror}") from None
    _prepare(folder, PRIVATE, uid, what)


def prepare_listed(folder: Path, uid: int) -> None:
    """Create the folder of a configured socket if it is missing."""
    try:
        if not folder.exists():
            _make(folder, socket_folder_mode(uid))
    except OSError as error:
        raise ConfigError(f"folder {folder}: cannot be made: {error.strerror}") from None


def _prepare(folder: Path, mode: int, uid: int, what: str) -> None:
    try:
        _make(folder, mode)
        own, parent = folder.lstat(), folder.parent.stat()
        # A link may be the user's own way to another disk: both it and its end must be ours.
        end = folder.stat()
    except OSError as error:
        raise ConfigError(f"{what} {folder}: cannot be made: {error.strerror}") from None
    for found in (own, end):
        if found.st_uid != uid:
            raise ConfigError(
                f"{what} {folder}: belongs to uid {found.st_uid}, and this bus runs as uid {uid}"
            )
    if end.st_mode & OTHERS_MAY_WRITE:
        raise ConfigError(f"{what} {folder}: others may write in it: chmod go-w {folder}")
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        # Without the sticky bit anyone could swap the folder for another.
        raise ConfigError(f"{what} {folder}: anyone may replace it: chmod +t {folder.parent}")


def _make(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "something else has that name") from None
        return
    folder.chmod(mode)  # mkdir's mode is cut by the umask
