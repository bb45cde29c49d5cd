"""Detects that a peer has hung up while its connection is not being read.

A paused connection gets no end-of-file, because that is queued after the bytes that the
peer sent before. epoll still reports the hang-up: one epoll instance watches the paused
connections, and the event loop watches that instance.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

MAX_EVENTS = 64  # per poll; the next poll returns the rest


class HangupMonitor:
    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, hung_up: Callable[[], None]) -> None:
        """Call `hung_up` once if the peer hangs up, until `forget`."""
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)
        self._callbacks[descriptor] = hung_up
        self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int) -> None:
        if self._epoll is not None and self._callbacks.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._callbacks.clear()

    def _look(self) -> None:
        if self._epoll is None:
            return
        for descriptor, _ in self._epoll.poll(0, MAX_EVENTS):
            hung_up = self._callbacks.get(descriptor)
            if hung_up is not None:
                hung_up()
