"""Keeps a client connected: one link at a time, and the next when it ends.

    new ──open──▶ up ◀──────────────┐
                  │ link ends       │ dialled, resubscribed, echo came
                  ▼                 │
                 down ──────────────┘      (with reconnect)
                  │
                  ▼
                failed                     (without, or when the server speaks another language)
    close leads from anywhere to closed.

A link counts as up only when its first echo is back: then the server is known
to speak rqueue, and everything in `topics` is subscribed. So whatever is
published on a new link comes after its subscriptions.

Waiting between attempts doubles, with jitter, so that many clients of a
restarted bus do not come back in step. It starts from the beginning only after
a link that lasted: a server that accepts and hangs up at once is not hammered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from polybus.dialects.rqueue.link import Link, dial, shake_hands
from polybus.dialects.rqueue.options import ClientOptions
from polybus.errors import ConnectionLost, NotConnected, PolybusError, UsageError
from polybus.kernel.notifications import NotificationBatch
from polybus.model.address import Address

log = logging.getLogger("polybus.rqueue")

# A link that lived this long was a good one.
STABLE_S = 5.0
# After everything was confirmed nothing is left to send; a TLS goodbye may still take a moment.
CLOSE_TIMEOUT_S = 1.0


class Lifeline:
    """See the top of the file."""

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        on_batch: Callable[[NotificationBatch], None],
        on_end: Callable[[Link], None],
        on_failure: Callable[[PolybusError], None],
    ) -> None:
        self.address = address
        self.options = options
        self.topics: dict[bytes, None] = {}  # an ordered set: what to subscribe on every link
        self.reconnects = 0
        self.last_loss: str | None = None
        self.wants_reading = True
        self._on_batch = on_batch
        self._on_end = on_end
        self._on_failure = on_failure
        self._link: Link | None = None
        self._changed = asyncio.Event()  # set while up, and for good when failed or closed
        self._failure: PolybusError | None = None
        self._upkeep: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._link is not None

    async def open(self) -> None:
        """Connect, once; `NotConnected` if nobody answers."""
        if self._upkeep is not None or self._failure is not None:
            raise UsageError("a client connects once: make another one")
        link = await self._dial()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up(link))

    async def ready(self) -> Link:
        """The link that is up, waiting for it if need be."""
        if self._link is not None:
            return self._link
        if self._failure is not None:
            raise self._failure
        if self._upkeep is None:
            raise UsageError("the client is not open: use it in a `with`, or call open()")
        try:
            async with asyncio.timeout(self.options.wait_timeout_s):
                await self._changed.wait()
        except TimeoutError:
            waited = f"{self.options.wait_timeout_s:g} s"
            raise NotConnected(f"no connection to {self.address} for {waited}") from None
        return await self.ready()

    def set_reading(self, wanted: bool) -> None:
        self.wants_reading = wanted
        if self._link is not None:
            self._link.set_reading(wanted)

    async def close(self) -> None:
        """End the link and stop making new ones."""
        link = self._link
        self._fail(NotConnected("the client is closed"))
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
        if link is not None:
            await self._hang_up(link)

    async def _hang_up(self, link: Link) -> None:
        link.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await link.ended.wait()
        except TimeoutError:
            link.abort()

    async def _dial(self) -> Link:
        link = Link(
            self.address,
            self.options.max_payload,
            self._on_batch,
            self._ended,
            reading=self.wants_reading,
        )
        timeout_s = self.options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await dial(link, self.options.tls)
                await shake_hands(link, self.topics, timeout_s)
            if link.ended.is_set():
                raise link.lost()
        except (OSError, ConnectionLost) as error:  # TimeoutError is an OSError
            link.abort()
            reason = str(error) or f"no rqueue server answered within {timeout_s:g} s"
            raise NotConnected(f"cannot connect to {self.address}: {reason}") from error
        except BaseException:
            link.abort()
            raise
        self._link = link
        link.set_reading(self.wants_reading)
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
                log.info("reconnected to %s", self.address)
        except PolybusError as error:
            self._fail(error)

    async def _redial(self, attempt: int) -> tuple[Link, int]:
        while True:
            await asyncio.sleep(self._backoff_s(attempt))
            try:
                return await self._dial(), attempt
            except NotConnected as error:
                self.last_loss = str(error)
                log.debug("%s", error)
                attempt += 1

    def _backoff_s(self, attempt: int) -> float:
        # 2^20 times the first wait is past any maximum; a larger exponent would only overflow.
        longest = self.options.backoff_first_s * (1 << min(attempt, 20))
        return min(longest, self.options.backoff_max_s) * random.uniform(0.5, 1.0)

    def _ended(self, link: Link) -> None:
        if link is not self._link:
            return  # it ended before it was up: `_dial` reports that
        self._link = None
        self._changed.clear()
        self._on_end(link)
        if link.error is None:
            return
        self.last_loss = str(link.error)
        if not self.options.reconnect or not isinstance(link.error, ConnectionLost):
            self._fail(link.error)
        else:
            log.warning("connection lost, reconnecting: %s", link.error)

    def _fail(self, error: PolybusError) -> None:
        if self._failure is None:
            self._failure = error
            self._on_failure(error)
        if self._upkeep is not None:
            self._upkeep.cancel()
        self._changed.set()
