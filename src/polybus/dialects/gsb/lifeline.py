"""Keeps a client connected: one link at a time, and the next when it ends.

    new ──open──▶ up ◀──────────────┐
                  │ link ends       │ dialled, introduced, pong came
                  ▼                 │
                 down ──────────────┘      (with reconnect)
                  │
                  ▼
                failed                     (without, or when the peer speaks another language)
    close leads from anywhere to closed.

A link counts as up only when it was introduced: the hello, all services and all
subscriptions, and a ping that was answered. So a call on a new link comes after what
this client serves is registered again.

Waiting between attempts doubles, with jitter, so that many clients of a restarted
bus do not come back in step. It starts from the beginning only after a link that lasted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from polybus.dialects.gsb.link import Link
from polybus.dialects.gsb.options import ClientOptions
from polybus.dialects.gsb.wire import dial
from polybus.errors import ConnectionLost, Denied, NotConnected, PolybusError, UsageError
from polybus.model.address import Address

log = logging.getLogger("polybus.gsb")

# A link that lived this long was a good one.
STABLE_S = 5.0
CLOSE_TIMEOUT_S = 1.0


async def reach(link: Link, introduce: Callable[[Link], Awaitable[None]]) -> None:
    """Dial and introduce; `NotConnected` if nobody answers who speaks GSB."""
    timeout_s = link.options.connect_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await dial(link)
            await introduce(link)
        if link.ended.is_set():
            raise link.lost()
    except PermissionError:
        link.abort()
        raise Denied(f"{link.address} is not for this user") from None
    except (OSError, ConnectionLost) as error:  # TimeoutError is an OSError
        link.abort()
        reason = str(error) or f"no GSB bus answered within {timeout_s:g} s"
        raise NotConnected(f"cannot connect to {link.address}: {reason}") from error
    except BaseException:
        link.abort()
        raise


class Lifeline:
    """See the top of the file."""

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        make: Callable[[Callable[[Link], None]], Link],
        introduce: Callable[[Link], Awaitable[None]],
        on_end: Callable[[PolybusError | None], None],
    ) -> None:
        self.link: Link | None = None  # the one that is up
        self.reconnects = 0
        self.last_loss: str | None = None
        self._address = address
        self._options = options
        self._make = make
        self._introduce = introduce
        self._on_end = on_end
        self._changed = asyncio.Event()  # set while up, and for good when failed or closed
        self._failure: PolybusError | None = None
        self._upkeep: asyncio.Task[None] | None = None

    @property
    def is_opened(self) -> bool:
        return self._upkeep is not None

    async def open(self) -> None:
        """Connect, once; `NotConnected` if nobody answers."""
        if self._upkeep is not None or self._failure is not None:
            raise UsageError("a client connects once: make another one")
        link = await self._dial()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up(link))

    async def ready(self) -> Link:
        """The link that is up, waiting for it if need be."""
        if self.link is not None:
            return self.link
        if self._failure is not None:
            raise self._failure
        if self._upkeep is None:
            raise UsageError("the client is not open: use it in a `with`, or call open()")
        waited_s = self._options.wait_timeout_s
        try:
            async with asyncio.timeout(waited_s):
                await self._changed.wait()
        except TimeoutError:
            raise NotConnected(f"no connection to {self._address} for {waited_s:g} s") from None
        return await self.ready()

    async def close(self) -> None:
        """End the link and stop making new ones."""
        link = self.link
        self._fail(NotConnected("the client is closed"))
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep])
        if link is None:
            return
        link.close()
        await link.end_within(CLOSE_TIMEOUT_S)

    async def _dial(self) -> Link:
        link = self._make(self._ended)
        await reach(link, self._introduce)
        self.link = link
        self._changed.set()
        return link

    async def _keep_up(self, link: Link) -> None:
        attempt = 0
        clock = asyncio.get_running_loop().time
        try:
            while True:
                began = clock()
                await link.ended.wait()
                attempt = 0 if clock() - began > STABLE_S else attempt + 1
                link, attempt = await self._redial(attempt)
                self.reconnects += 1
                log.info("reconnected to %s", self._address)
        except PolybusError as error:
            self._fail(error)

    async def _redial(self, attempt: int) -> tuple[Link, int]:
        while True:
            await asyncio.sleep(self._backoff_s(attempt))
            try:
                return await self._dial(), attempt
            except (NotConnected, Denied) as error:
                # Denied, too: a bus that is being set up may have its socket's rights to come.
                self.last_loss = str(error)
                log.debug("%s", error)
                attempt += 1

    def _backoff_s(self, attempt: int) -> float:
        # 2^20 times the first wait is past any maximum; a larger exponent would only overflow.
        longest_s = self._options.backoff_first_s * (1 << min(attempt, 20))
        return min(longest_s, self._options.backoff_max_s) * random.uniform(0.5, 1.0)

    def _ended(self, link: Link) -> None:
        if link is not self.link:
            return  # it ended before it was up: `_dial` reports that
        self.link = None
        if self._failure is None:
            self._changed.clear()
        self._on_end(None)
        if link.error is None:
            return
        self.last_loss = str(link.error)
        if not self._options.reconnect or not isinstance(link.error, ConnectionLost):
            self._fail(link.error)
        else:
            log.warning("connection lost, reconnecting: %s", link.error)

    def _fail(self, error: PolybusError) -> None:
        if self._failure is None:
            self._failure = error
            self._on_end(error)
        if self._upkeep is not None and self._upkeep is not asyncio.current_task():
            self._upkeep.cancel()
        self._changed.set()
