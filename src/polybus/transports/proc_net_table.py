"""The socket table as text, for hosts where netlink is not available (some sandboxes).

Every query reads all sockets of the host, so it is a fallback only, and it refuses tables
longer than those of a busy host. Results need the same checks as those of netlink: see
`socket_table`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from polybus.transports.socket_table import SocketEnd, owner_of

MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address inside an IPv6 one
# A line has about 150 bytes, so this is about 50,000 sockets, or 50 ms.
MAX_TABLE_BYTES = 8 * 1024 * 1024
# The kernel writes the table a page at a time. An entry that stays can be missing from it when
# others before it end between two pages.
TRIES = 3
LOCAL, REMOTE, STATE, UID, INODE = 1, 2, 3, 7, 9  # columns


class ProcNetSocketTable:
    def __init__(self, folder: Path = Path("/proc/net")) -> None:
        self._folder = folder

    def owner(self, far: SocketEnd, near: SocketEnd) -> int | None:
        for name, width in (("tcp", 4), ("tcp6", 16)) * TRIES:
            ends = [_shown(end, width) for end in (far, near)]
            if None not in ends:
                for columns in self._lines(name):
                    if columns[LOCAL : REMOTE + 1] == ends:
                        state, uid, inode = columns[STATE], columns[UID], columns[INODE]
                        return owner_of(int(state, 16), int(uid), int(inode))
        return None

    def _lines(self, name: str) -> Iterator[list[str]]:
        try:
            with (self._folder / name).open("rb") as table:
                lines = table.read(MAX_TABLE_BYTES).splitlines()[1:]
        except OSError:
            return
        for line in lines:
            columns = line.decode("ascii").split()
            if len(columns) > INODE:
                yield columns


def _shown(end: SocketEnd, width: int) -> str | None:
    """Return an endpoint as the table writes it: hexadecimal words in host byte order."""
    ip = MAPPED + end.ip if width == 16 and len(end.ip) == 4 else end.ip
    if len(ip) != width:
        return None
    words = struct.unpack(f"={width // 4}I", ip)
    return "".join(f"{word:08X}" for word in words) + f":{end.port:04X}"


def packed(host: str) -> bytes:
    """Return an address as bytes; IPv4-mapped IPv6 becomes IPv4, as in the kernel's table."""
    if ":" not in host:
        return socket.inet_pton(socket.AF_INET, host)
    ip = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return ip[12:] if ip.startswith(MAPPED) else ip
