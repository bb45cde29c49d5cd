"""Duplicates of sockets without a free descriptor."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polybus.transports.spare_descriptor import SpareDescriptor


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open(os.devnull, os.O_RDONLY)
    taken = [held]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 64, hard))
    try:
        while True:
            try:
                taken.append(os.dup(held))
            except OSError:
                break
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connection_is_shut_down_without_a_free_descriptor():
    spare = SpareDescriptor()
    ours, theirs = socket.socketpair()
    with ours, theirs, no_free_descriptor():
        with spare.duplicate(ours.fileno()) as sock:
            assert sock is not None
            sock.shutdown(socket.SHUT_RDWR)
        assert theirs.recv(1) == b""


def test_duplicate_does_not_keep_a_connection_open():
    spare = SpareDescriptor()
    ours, theirs = socket.socketpair()
    with theirs:
        with spare.duplicate(ours.fileno()) as sock:
            assert sock is not None
        ours.close()
        assert theirs.recv(1) == b""


def test_closed_descriptors_and_files_are_not_sockets():
    spare = SpareDescriptor()
    with Path(os.devnull).open("rb") as file, spare.duplicate(file.fileno()) as sock:
        assert sock is None
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    ours.close()
    theirs.close()
    with spare.duplicate(number) as sock:
        assert sock is None
