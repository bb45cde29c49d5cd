"""The process at the other end of a Unix socket, as the host's kernel reports it.

All values are those of the moment the peer connected, except the service, which is looked
up when the bus accepts: the process may have ended by then, and its pid may be reused.
Linux 6.5 and later return a handle of the process itself (SO_PEERPIDFD), so that an ended
process has no service. On older kernels a small window remains.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from typing import Protocol

from polybus.model.identity import Identity
from polybus.transports.descriptor_reserve import descriptor_reserve

CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
ID_BYTES = 4
NO_ID = 0xFFFFFFFF
# Python has no names for these; the numbers differ on sparc and parisc.
SO_PEERGROUPS = 59
SO_PEERPIDFD = 77
NOT_KNOWN_HERE = (errno.ENOPROTOOPT, errno.EOPNOTSUPP)
# The peer has a service then, and the bus does not know it.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
USUAL_GROUPS = 64
# The limit of Python's getsockopt; for more groups libc is called directly.
PYTHON_BYTES = 1024

UNIT_SUFFIX = ".service"
DELETED = " (deleted)"
MAX_CGROUP_BYTES = 64 * 1024


class SocketOptions(Protocol):
    def fileno(self) -> int: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def of_unix_peer(sock: SocketOptions) -> Identity:
    """Return the identity of the peer. Raises OSError if a part of it cannot be known."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, gid = CREDENTIALS.unpack(raw)
    uid, gid = uid & NO_ID, gid & NO_ID
    return Identity(uid, gid, pid, groups=_groups(sock), service=_service(sock, pid))


def _groups(sock: SocketOptions) -> frozenset[int] | None:
    """Return the supplementary groups, or None on kernels before 4.13."""
    size = USUAL_GROUPS * ID_BYTES
    while True:
        try:
            raw = _option(sock, SO_PEERGROUPS, size)
            return frozenset(struct.unpack(f"={len(raw) // ID_BYTES}I", raw))
        except OSError as error:
            if error.errno != errno.ERANGE:
                return None
        size *= 4


def _option(sock: SocketOptions, option: int, size: int) -> bytes:
    if size <= PYTHON_BYTES:
        return sock.getsockopt(socket.SOL_SOCKET, option, size)
    import ctypes  # only for a peer in hundreds of groups

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(size)
    length = ctypes.c_uint32(size)
    failed = libc.getsockopt(sock.fileno(), socket.SOL_SOCKET, option, buffer, ctypes.byref(length))
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw[: length.value]


def _service(sock: SocketOptions, pid: int) -> str:
    if pid <= 0:  # the peer is in a pid namespace that is not visible here
        return ""
    try:
        handle = descriptor_reserve.open_socket_option(sock.fileno(), SO_PEERPIDFD)
    except OSError as error:
        _check_exhausted(error)
        return service_of(pid) if error.errno in NOT_KNOWN_HERE else ""
    try:
        service = service_of(pid)
        return "" if _has_ended(handle) else service
    finally:
        os.close(handle)


def _has_ended(handle: int) -> bool:
    watch = select.poll()
    watch.register(handle, select.POLLIN)
    return bool(watch.poll(0))


def service_of(pid: int, proc: str = "/proc") -> str:
    """Return the unit of a process, else its executable, else an empty string.

    Raises OSError if the process may have one, and the bus has no descriptor to look it up.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        folder = descriptor_reserve.open_file(f"{proc}/{pid}", flags)
    except OSError as error:
        _check_exhausted(error)
        return ""
    try:
        return unit_of(_cgroups(folder)) or _executable(folder)
    finally:
        os.close(folder)


def _check_exhausted(error: OSError) -> None:
    """Raise an error of a lookup that says nothing about the process."""
    if error.errno in EXHAUSTED:
        raise error


def unit_of(cgroups: str) -> str:
    """Return the innermost `.service` of the cgroup (v2, else systemd's hierarchy of v1)."""
    if UNIT_SUFFIX not in cgroups:  # most processes run in no unit; skip the parsing
        return ""
    paths: dict[str, str] = {}
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths[controllers if controllers or number != "0" else "v2"] = path.removesuffix(DELETED)
    for controllers in ("v2", "name=systemd"):
        for part in reversed(paths.get(controllers, "").split("/")):
            if part.endswith(UNIT_SUFFIX) and part != UNIT_SUFFIX:
                return part
    return ""


def _cgroups(folder: int) -> str:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        file = descriptor_reserve.open_file("cgroup", flags, folder)
    except OSError as error:
        _check_exhausted(error)
        return ""
    try:
        return os.read(file, MAX_CGROUP_BYTES).decode("utf-8", errors="replace")
    except OSError:  # the process has just ended
        return ""
    finally:
        os.close(file)


def _executable(folder: int) -> str:
    try:
        path = os.readlink("exe", dir_fd=folder)
    except OSError:
        return ""  # a process of another user, or a kernel thread
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
