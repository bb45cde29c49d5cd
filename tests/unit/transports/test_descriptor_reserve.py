"""Descriptors for the bus itself, after other libraries have taken all others."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.server import user_directory
from polybus.server.user_directory import account_of, uid_of
from polybus.transports import borrowed_descriptor, unix_credentials
from polybus.transports.descriptor_reserve import DescriptorReserve, Limits
from polybus.transports.peer_identity import identify_peer
from polybus.transports.unix_credentials import service_of

FREE_BEFORE = 16


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def has_free_descriptor() -> bool:
    try:
        os.close(os.dup(0))
    except OSError:
        return False
    return True


@pytest.fixture
def reserve() -> Iterator[DescriptorReserve]:
    """A reserve, and no other free descriptor."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    null = os.open(os.devnull, os.O_RDONLY)
    taken = [null]
    reserve = DescriptorReserve()
    # Above all that are open: other tests of this process may have opened many.
    highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    reserve.keep(highest + FREE_BEFORE)
    try:
        while has_free_descriptor():
            taken.append(os.dup(null))
        yield reserve
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_null(reserve: DescriptorReserve) -> int:
    return reserve.open_file(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def test_reserve_is_for_those_that_borrow(reserve: DescriptorReserve):
    assert not has_free_descriptor()
    first, second = open_null(reserve), open_null(reserve)
    assert (first, second) == (soft_limit(), soft_limit() + 1)
    assert not has_free_descriptor()
    os.close(first)
    assert not has_free_descriptor(), "a closed one of the reserve is for others"
    assert open_null(reserve) == first
    os.close(first)
    os.close(second)


def test_connection_is_accepted_without_another_descriptor(reserve: DescriptorReserve):
    with reserve.borrow(2):
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
    with listener, client, reserve.accept(listener) as accepted:
        assert accepted.getpeername() == client.getsockname()
        assert not os.get_blocking(accepted.fileno())
        assert not os.get_inheritable(accepted.fileno())
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            reserve.accept(listener)


def test_listener_leaves_spared_descriptors_to_others(reserve: DescriptorReserve):
    with reserve.borrow(2):
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
    size = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - soft_limit()
    with listener, client:
        with pytest.raises(OSError, match="Too many open files"):
            reserve.accept(listener, spared=size)
        reserve.accept(listener, spared=size - 3).close()


def test_borrowed_descriptor_that_another_thread_takes_is_replaced(
    reserve: DescriptorReserve, monkeypatch: pytest.MonkeyPatch
):
    stolen: list[int] = []
    open_file = borrowed_descriptor.open_file

    def open_after_a_thief(limits: Limits, path: bytes, flags: int, folder: int) -> int:
        if limits[0] > limits[1] and len(stolen) < 3:
            stolen.append(open_file(limits, path, flags, folder))
            raise OSError(errno.EMFILE, "another thread was first")
        return open_file(limits, path, flags, folder)

    monkeypatch.setattr(borrowed_descriptor, "open_file", open_after_a_thief)
    opened = open_null(reserve)
    assert [*stolen, opened] == [*range(soft_limit(), soft_limit() + 4)]
    assert not has_free_descriptor()
    for number in (*stolen, opened):
        os.close(number)


def test_other_errors_are_raised(reserve: DescriptorReserve):
    with pytest.raises(FileNotFoundError):
        reserve.open_file("/no/such/file", os.O_RDONLY)


def test_loans_of_two_threads_end_one_by_one(reserve: DescriptorReserve):
    usual = soft_limit()
    borrowed, go_on = threading.Event(), threading.Event()

    def borrow_long() -> None:
        with reserve.borrow(4):
            borrowed.set()
            go_on.wait(20)

    thread = threading.Thread(target=borrow_long)
    thread.start()
    assert borrowed.wait(20)
    with reserve.borrow(1):
        assert soft_limit() == usual + 4
    assert soft_limit() == usual + 4
    go_on.set()
    thread.join()
    assert soft_limit() == usual


def test_without_a_reserve_the_error_is_that_of_the_call(reserve: DescriptorReserve):
    with pytest.raises(OSError, match="Too many open files"):
        open_null(DescriptorReserve())


def test_service_of_a_peer_is_known_with_a_reserve_and_in_doubt_without(
    reserve: DescriptorReserve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unix_credentials, "descriptor_reserve", reserve)
    with reserve.borrow(2):
        near, far = socket.socketpair()
    with near, far:
        assert identify_peer(near).service == service_of(os.getpid()) != ""
        monkeypatch.setattr(unix_credentials, "descriptor_reserve", DescriptorReserve())
        assert identify_peer(near).is_in_doubt


def test_groups_are_known_with_a_reserve_and_an_error_without(
    reserve: DescriptorReserve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(user_directory, "descriptor_reserve", reserve)
    assert account_of(os.getuid()).name is not None
    assert uid_of("root") == 0
    assert uid_of("no-such-user") is None
    monkeypatch.setattr(user_directory, "descriptor_reserve", DescriptorReserve())
    with pytest.raises(OSError, match="Too many open files"):
        account_of(os.getuid())
    with pytest.raises(OSError, match="Too many open files"):
        uid_of("root")
