"""Files of Unix sockets, and the handling of existing ones.

A killed bus leaves its socket files behind. A socket without a listener is replaced; one
with a listener belongs to a running bus and is an error; a file that is not a socket is
not touched.

Looking, removing and binding are three steps, and two buses that start at the
same moment could remove each other's fresh socket between them. So all three
happen under an flock on the folder (`claimed`), which leaves no file behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polybus.errors import AddressError, AddressInUse
from polybus.server import folders

if TYPE_CHECKING:
    from polybus.server.listener_plan import ListenerSpec

# A living bus accepts at once; one too busy to do so fills its backlog, and that is an answer.
ANSWER_TIMEOUT_S = 1.0
# Another bus holds the folder for as long as a bind takes. A process that holds
# it longer (in /tmp any user may) must not block the start forever.
CLAIM_TIMEOUT_S = 5.0


@contextlib.contextmanager
def claimed_path(path: Path) -> Iterator[None]:
    """While inside, the path is free to bind and no other bus of ours takes it."""
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise AddressError(f"unix:{path}: cannot be used: {error.strerror}") from None
    try:
        _lock(fd, path)
        _clear(path)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def prepared_path(
    stack: contextlib.AsyncExitStack, wanted: ListenerSpec, uid: int
) -> Iterator[None]:
    """While inside, a listener may be bound: of a socket file, the folder is made and it is ours.

    The stack removes that file in the end.
    """
    if not wanted.address.is_unix:
        yield
        return
    path = Path(wanted.address.path)
    if wanted.listed:
        folders.prepare_listed(path.parent, uid)
    else:
        folders.prepare_runtime(path.parent, uid)
    with claimed_path(path):
        yield
        stack.callback(remove, path, identify(path))


def identify(path: Path) -> tuple[int, int]:
    """Return the device and inode, which distinguish the file from a later one of its name."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def remove(path: Path, mine: tuple[int, int]) -> None:
    """Remove the socket file, unless another file has replaced it."""
    with contextlib.suppress(OSError):
        if identify(path) == mine:
            path.unlink()


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + CLAIM_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise AddressInUse(
                    f"unix:{path}: another process keeps its folder locked"
                ) from None
        time.sleep(0.01)


def _clear(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressError(f"unix:{path}: cannot be used: {error.strerror}") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise AddressError(f"unix:{path} exists and is not a socket; remove it or use another path")
    if _is_listening(path):
        raise AddressInUse(f"unix:{path}: a running bus already listens there")
    path.unlink(missing_ok=True)


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                return False
            if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
                return True
            raise AddressError(f"unix:{path}: cannot be used: {error.strerror}") from None
    return True
