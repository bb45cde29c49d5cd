"""A descriptor that is kept open, to reach sockets of other libraries when none is left.

libzmq owns its connections. To inspect or shut down one of them, the bus duplicates its
descriptor: the duplicate stays the same socket even if libzmq closes its own and the number is
used again. A flood of connections may have taken every descriptor, and just then
connections must be shut down. So the duplicate replaces a descriptor that is open already.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class SpareDescriptor:
    """One descriptor for duplicates, one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._unused = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._spare = os.dup(self._unused)
        self._lock = Lock()

    @contextmanager
    def duplicate(self, descriptor: int) -> Iterator[socket.socket | None]:
        """Yield the socket of a descriptor; None if it is closed, or not a socket."""
        with self._lock:
            try:
                os.dup2(descriptor, self._spare, inheritable=False)
            except OSError:  # closed since it was listed, or the spare one itself
                yield None
                return
            try:
                sock = socket.socket(fileno=self._spare)
            except OSError:
                yield None
            else:
                try:
                    yield sock
                finally:
                    sock.detach()
            finally:
                os.dup2(self._unused, self._spare, inheritable=False)


@functools.cache
def spare_descriptor(user: str) -> SpareDescriptor:
    """Return the spare descriptor of one part of the bus. Open it before the first connection."""
    return SpareDescriptor()
