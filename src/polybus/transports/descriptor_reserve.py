"""Descriptors that only the bus itself can use, and not libzmq.

libzmq accepts connections until the process has no free descriptor; the bus can close
them only afterwards. The kernel compares the number of a new descriptor with the soft limit of
the process. So the bus keeps the soft limit below the hard one: the numbers between them are
the reserve. Where the bus itself finds no free descriptor, it borrows: it raises the soft limit
by one free number, opens, and lowers it again.

A thread of libzmq that accepts a connection just then may get that number. Then the bus
borrows the next one. Its listener closes the connection, as all that are too many.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from polybus.transports import borrowed_descriptor

Limits = tuple[int, int, int]  # as those of `borrowed_descriptor`
AT_FDCWD = -100  # of openat: a path is relative to the current folder


class DescriptorReserve:
    """The reserve of this process. Thread-safe. Without `keep` it is empty."""

    def __init__(self) -> None:
        self._start: int | None = None
        self._hard = 0
        self._raised: list[int] = []  # a limit for each open `borrow`
        self._lock = Lock()

    def keep(self, start: int) -> None:
        """Reserve the numbers from `start` to the hard limit.

        Raises:
            OSError, ValueError: the limit cannot be changed, and there is no reserve.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (start, hard))
        self._start, self._hard = start, hard

    def accept(self, listener: socket.socket, spared: int = 0) -> socket.socket:
        """Accept a pending connection, and leave the last `spared` descriptors free.

        Raises OSError as `socket.accept` does.
        """
        if self._start is None:
            return listener.accept()[0]
        number = listener.fileno()
        accepted = self._open(
            lambda limits: borrowed_descriptor.accept_connection(limits, number), spared
        )
        return socket.socket(fileno=accepted)

    def open_file(self, path: str, flags: int, folder: int = AT_FDCWD) -> int:
        """Open a file as `os.open` does. Raises OSError."""
        name = os.fsencode(path)
        return self._open(lambda limits: borrowed_descriptor.open_file(limits, name, flags, folder))

    def open_socket_option(self, sock: int, option: int) -> int:
        """Return the descriptor that an option of a socket opens. Raises OSError."""
        return self._open(
            lambda limits: borrowed_descriptor.open_socket_option(limits, sock, option)
        )

    @contextmanager
    def borrow(self, count: int) -> Iterator[None]:
        """Allow the process to open `count` descriptors of the reserve, within the block.

        Other threads may take them.
        """
        if self._start is None:
            yield
            return
        with self._lock:
            limit = self._hard
            for number in self._free_numbers(self._start):
                count -= 1
                if not count:
                    limit = number + 1
                    break
            self._raised.append(limit)
            self._apply(self._start)
        try:
            yield
        finally:
            with self._lock:
                self._raised.remove(limit)
                self._apply(self._start)

    def _open(self, call: Callable[[Limits], int], spared: int = 0) -> int:
        """Return the descriptor that a call opens, of the reserve if there is no other."""
        if self._start is None:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return call((soft, soft, hard))
        with self._lock:
            usual = self._usual(self._start)
            try:
                return call((usual, usual, self._hard))
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
            for number in self._free_numbers(usual):
                if number >= self._hard - spared:
                    break
                try:
                    return call((number + 1, usual, self._hard))
                except OSError as error:
                    if error.errno != errno.EMFILE:  # else another thread has taken it
                        raise
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _free_numbers(self, start: int) -> Iterator[int]:
        for number in range(start, self._hard):
            try:
                fcntl.fcntl(number, fcntl.F_GETFD)
            except OSError:
                yield number

    def _usual(self, start: int) -> int:
        return max(self._raised, default=start)

    def _apply(self, start: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._usual(start), self._hard))


descriptor_reserve = DescriptorReserve()
