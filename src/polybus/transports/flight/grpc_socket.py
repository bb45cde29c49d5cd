"""The socket that gRPC listens on: a Unix socket that no other process can reach.

gRPC listens on a path only. The path is in a folder of its own and is removed as soon as gRPC
listens: this process connects through a descriptor of the socket, so nothing stays behind if it
is killed.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from urllib.parse import quote

BUFFER_BYTES = 1 << 20  # on the way to gRPC: a few batches


class GrpcSocket:
    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="polybus-")) / "grpc"
        self._descriptor = -1

    @property
    def location(self) -> str:
        """The address for gRPC, until `hide`."""
        return f"grpc+unix://{quote(str(self._path))}"

    def hide(self) -> None:
        """Remove the path, because gRPC listens or has failed."""
        if self._path.exists():
            self._descriptor = os.open(self._path, os.O_PATH | os.O_CLOEXEC)
            self._path.unlink()
        self._path.parent.rmdir()

    def connect(self, name: str) -> socket.socket:
        """Connect to gRPC, which gets `name` as the peer of the calls. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            sock.bind(b"\0" + name.encode())
            sock.connect(f"/proc/self/fd/{self._descriptor}")
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
