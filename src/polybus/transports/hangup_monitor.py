"""Notices that a peer has hung up while nobody reads from it.

A connection that is not read from gets no end-of-file: that waits in line behind
what was sent before it. The kernel tells of a hang-up all the same, to whoever
asks: one epoll of our own watches the connections that are not being read, and
the event loop watches that epoll.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

MAX_EVENTS = 64  # of one look; the rest is told at the next


class HangupMonitor:
    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, hung_up: Callable[[], None]) -> None:
        """Calls `hung_up` once if the peer hangs up; until `forget`."""
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
