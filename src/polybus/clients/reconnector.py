"""Keeps a client connected: one link at a time, and the next when it ends.

    new ──open──▶ up ◀──────────────┐
                  │ link ends       │ dialled, and introduced to the bus
                  ▼                 │
                 down ──────────────┘      (with reconnect)
                  │
                  ▼
                failed                     (without, or when the peer speaks another language)
    close leads from anywhere to closed.

A link counts as up only when the bus has answered, and knows what it is to know: all
subscriptions, all services. So whatever is sent on a new link comes after them.

Waiting between attempts doubles, with jitter, so that many clients of a restarted bus do
not come back in step. It starts from the beginning only after a link that lasted: a server
that accepts and hangs up at once is not hammered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from polybus.errors import ConnectionLost, Denied, NotConnected, PolybusError, UsageError
from polybus.model.address import Address

# A link that lived this long was a good one.
STABLE_S = 5.0
# What was asked has been answered; a TLS goodbye may still take a moment.
CLOSE_TIMEOUT_S = 1.0


class ReconnectableConnection(Protocol):
    """One connection. `error` is why it ended, None if we closed it ourselves."""

    address: Address
    ended: asyncio.Event
    error: PolybusError | None

    def close(self) -> None: ...
    def abort(self) -> None: ...
    def make_loss_error(self) -> PolybusError: ...


class ReconnectOptions(Protocol):
    """What of a client's options is about its connection."""

    @property
    def reconnect(self) -> bool: ...
    @property
    def wait_timeout_s(self) -> float: ...
    @property
    def backoff_first_s(self) -> float: ...
    @property
    def backoff_max_s(self) -> float: ...


L = TypeVar("L", bound=ReconnectableConnection)


class Reconnector(Generic[L]):
    """See the top of the file.

    `dial` makes a link that was introduced to the bus, and sees to it that `ended` is told of
    its end. `on_end` is told when the link that was up has ended, `on_failure` that there will
    be no more: why, and once.
    """

    def __init__(
        self,
        dialect: str,
        address: Address,
        options: ReconnectOptions,
        dial: Callable[[], Awaitable[L]],
        on_end: Callable[[L], None],
        on_failure: Callable[[PolybusError], None],
    ) -> None:
        self.link: L | None = None  # the one that is up
        self.reconnects = 0
        self.last_loss: str | None = None
        self._address = address
        self._options = options
        self._make = dial
        self._on_end = on_end
        self._on_failure = on_failure
        self._log = logging.getLogger(f"polybus.{dialect}")
        self._changed = asyncio.Event()  # set while up, and for good when failed or closed
        self._failure: PolybusError | None = None
        self._reconnect_task: asyncio.Task[None] | None = None

    @property
    def is_opened(self) -> bool:
        return self._reconnect_task is not None

    async def open(self) -> None:
        """Connect, once; `NotConnected` if nobody answers."""
        if self._reconnect_task is not None or self._failure is not None:
            raise UsageError("a client connects once: make another one")
        link = await self._dial()
        self._reconnect_task = asyncio.get_running_loop().create_task(
            self._maintain_connection(link)
        )

    async def wait_connected(self) -> L:
        """The link that is up, waiting for it if need be."""
        if self.link is not None:
            return self.link
        if self._failure is not None:
            raise self._failure
        if self._reconnect_task is None:
            raise UsageError("the client is not open: use it in a `with`, or call open()")
        waited_s = self._options.wait_timeout_s
        try:
            async with asyncio.timeout(waited_s):
                await self._changed.wait()
        except TimeoutError:
            raise NotConnected(f"no connection to {self._address} for {waited_s:g} s") from None
        return await self.wait_connected()

    async def close(self) -> None:
        """End the link and stop making new ones."""
        link = self.link
        self._fail(NotConnected("the client is closed"))
        if self._reconnect_task is not None:
            await asyncio.wait([self._reconnect_task])
        if link is not None:
            link.close()
            await wait_closed(link, CLOSE_TIMEOUT_S)

    def on_connection_ended(self, link: L) -> None:
        """A link that `dial` made has ended."""
        if link is not self.link:
            return  # it ended before it was up: `reach` reports that
        self.link = None
        if self._failure is None:
            self._changed.clear()
        self._on_end(link)
        if link.error is None:
            return
        self.last_loss = str(link.error)
        if not self._options.reconnect or not isinstance(link.error, ConnectionLost):
            self._fail(link.error)
        else:
            self._log.warning("connection lost, reconnecting: %s", link.error)

    async def _dial(self) -> L:
        link = self.link = await self._make()
        self._changed.set()
        return link

    async def _maintain_connection(self, link: L) -> None:
        attempt = 0
        clock = asyncio.get_running_loop().time
        try:
            while True:
                began = clock()
                await link.ended.wait()
                attempt = 0 if clock() - began > STABLE_S else attempt + 1
                link, attempt = await self._redial(attempt)
                self.reconnects += 1
                self._log.info("reconnected to %s", self._address)
        except PolybusError as error:
            self._fail(error)

    async def _redial(self, attempt: int) -> tuple[L, int]:
        while True:
            await asyncio.sleep(self._backoff_s(attempt))
            try:
                return await self._dial(), attempt
            except (NotConnected, Denied) as error:
                # Denied, too: a bus that is being set up may have its socket's rights to come.
                self.last_loss = str(error)
                self._log.debug("%s", error)
                attempt += 1

    def _backoff_s(self, attempt: int) -> float:
        # 2^20 times the first wait is past any maximum; a larger exponent would only overflow.
        longest_s = self._options.backoff_first_s * (1 << min(attempt, 20))
        return min(longest_s, self._options.backoff_max_s) * random.uniform(0.5, 1.0)

    def _fail(self, error: PolybusError) -> None:
        if self._failure is None:
            self._failure = error
            self._on_failure(error)
        if self._reconnect_task is not None and self._reconnect_task is not asyncio.current_task():
            self._reconnect_task.cancel()
        self._changed.set()


async def complete_handshake(
    link: ReconnectableConnection, introduce: Awaitable[None], timeout_s: float, whom: str
) -> None:
    """Wait until it is dialled and introduced; `NotConnected` if that is not to be had."""
    try:
        async with asyncio.timeout(timeout_s):
            await introduce
        if link.ended.is_set():
            raise link.make_loss_error()
    except PermissionError:
        link.abort()
        raise Denied(f"{link.address} is not for this user") from None
    except (OSError, ConnectionLost) as error:  # TimeoutError is an OSError
        link.abort()
        reason = str(error) or f"no {whom} answered within {timeout_s:g} s"
        raise NotConnected(f"cannot connect to {link.address}: {reason}") from error
    except BaseException:
        link.abort()
        raise


async def wait_closed(link: ReconnectableConnection, timeout_s: float) -> None:
    """Wait for its end after `close`; make it end if that takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            await link.ended.wait()
    except TimeoutError:
        link.abort()
