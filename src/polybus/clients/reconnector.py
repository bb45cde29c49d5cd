"""Keeps a client connected: one connection at a time, and the next one when it ends.

    new ──open──▶ up ◀──────────────┐
                  │ connection ends │ handshake complete
                  ▼                 │
                 down ──────────────┘      (with reconnect)
                  │
                  ▼
                failed                     (without, or if the peer speaks another protocol)
    close leads from any state to closed.

A connection counts as up only when the bus has answered its handshake and knows all
subscriptions and services. Later requests on that connection therefore follow them.

The delay between attempts doubles, with jitter, so that the clients of a restarted bus do
not reconnect in step. It is reset only after a connection that lasted STABLE_S, so a server
that accepts and closes at once is not flooded.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from polybus.clients.async_client import AsyncClient
from polybus.errors import ConnectionLost, Denied, NotConnected, PolybusError, UsageError
from polybus.model.address import Address

# A connection that lasted this long resets the back-off.
STABLE_S = 5.0
# Requests were answered before; a TLS shutdown may still take a moment.
CLOSE_TIMEOUT_S = 1.0


class ReconnectableConnection(Protocol):
    """One connection. `error` is why it ended, None if the client closed it."""

    address: Address
    ended: asyncio.Event
    error: PolybusError | None

    def close(self) -> None: ...
    def abort(self) -> None: ...
    def make_loss_error(self) -> PolybusError: ...


class ReconnectOptions(Protocol):
    """The options of a client that concern its connection."""

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
    """Holds the connection of one client, and replaces it when it ends.

    `dial` returns a connection whose handshake is complete, and must call
    `on_connection_ended` at its end. `on_end` is called when the connection that was up has
    ended, `on_failure` once, with the reason, when there will be no further connection.
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
        self.connection: L | None = None  # the one that is up
        self.reconnects = 0
        self.last_loss: str | None = None
        self._address = address
        self._options = options
        self._make = dial
        self._on_end = on_end
        self._on_failure = on_failure
        self._log = logging.getLogger(f"polybus.{dialect}")
        self._changed = asyncio.Event()  # set while up, and forever when failed or closed
        self._failure: PolybusError | None = None
        self._reconnect_task: asyncio.Task[None] | None = None

    @property
    def is_opened(self) -> bool:
        return self._reconnect_task is not None

    async def open(self) -> None:
        """Connect. Raises NotConnected if no bus answers, UsageError at a second call."""
        if self._reconnect_task is not None or self._failure is not None:
            raise UsageError("a client can be opened only once; create another one")
        connection = await self._dial()
        self._reconnect_task = asyncio.get_running_loop().create_task(
            self._maintain_connection(connection)
        )

    async def wait_connected(self) -> L:
        """Return the connection that is up, or wait for it up to `wait_timeout_s`."""
        if self.connection is not None:
            return self.connection
        if self._failure is not None:
            raise self._failure
        if self._reconnect_task is None:
            raise UsageError("the client is not open; use it in a `with`, or call open()")
        waited_s = self._options.wait_timeout_s
        try:
            async with asyncio.timeout(waited_s):
                await self._changed.wait()
        except TimeoutError:
            raise NotConnected(f"no connection to {self._address} for {waited_s:g} s") from None
        return await self.wait_connected()

    async def close(self) -> None:
        """Close the connection and stop reconnecting."""
        connection = self.connection
        self._fail(NotConnected("the client is closed"))
        if self._reconnect_task is not None:
            await asyncio.wait([self._reconnect_task])
        if connection is not None:
            connection.close()
            await wait_closed(connection, CLOSE_TIMEOUT_S)

    def on_connection_ended(self, connection: L) -> None:
        """Handle the end of a connection that `dial` returned."""
        if connection is not self.connection:
            return  # it ended during the handshake, which raises
        self.connection = None
        if self._failure is None:
            self._changed.clear()
        self._on_end(connection)
        if connection.error is None:
            return
        self.last_loss = str(connection.error)
        if not self._options.reconnect or not isinstance(connection.error, ConnectionLost):
            self._fail(connection.error)
        else:
            self._log.warning("connection lost, reconnecting: %s", connection.error)

    async def _dial(self) -> L:
        connection = self.connection = await self._make()
        self._changed.set()
        return connection

    async def _maintain_connection(self, connection: L) -> None:
        attempt = 0
        clock = asyncio.get_running_loop().time
        try:
            while True:
                began = clock()
                await connection.ended.wait()
                attempt = 0 if clock() - began > STABLE_S else attempt + 1
                connection, attempt = await self._redial(attempt)
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
                # Denied, too: a starting bus may not have set its socket's permissions yet.
                self.last_loss = str(error)
                self._log.debug("%s", error)
                attempt += 1

    def _backoff_s(self, attempt: int) -> float:
        # 2^20 times the first delay exceeds any maximum; the cap avoids an overflow.
        longest_s = self._options.backoff_first_s * (1 << min(attempt, 20))
        return min(longest_s, self._options.backoff_max_s) * random.uniform(0.5, 1.0)

    def _fail(self, error: PolybusError) -> None:
        if self._failure is None:
            self._failure = error
            self._on_failure(error)
        # The reconnect task itself fails when a new connection is refused for good.
        if self._reconnect_task is not None and self._reconnect_task is not asyncio.current_task():
            self._reconnect_task.cancel()
        # Set last: a waiter that wakes up must find the failure.
        self._changed.set()


class ReconnectingClient(AsyncClient, Generic[L]):
    """A client whose connection is replaced when it ends."""

    _reconnector: Reconnector[L]

    @property
    def is_connected(self) -> bool:
        return self._reconnector.connection is not None

    @property
    def reconnects(self) -> int:
        """Number of reconnects; messages of others may have been missed at each."""
        return self._reconnector.reconnects

    @property
    def last_loss(self) -> str | None:
        """The error of the last connection or attempt that failed."""
        return self._reconnector.last_loss


async def complete_handshake(
    connection: ReconnectableConnection, handshake: Awaitable[None], timeout_s: float, peer: str
) -> None:
    """Await the handshake. Raises NotConnected if it fails or takes too long, or Denied."""
    try:
        async with asyncio.timeout(timeout_s):
            await handshake
        if connection.ended.is_set():
            raise connection.make_loss_error()
    except PermissionError:
        connection.abort()
        raise Denied(f"access to {connection.address} denied for this user") from None
    except (OSError, ConnectionLost) as error:  # TimeoutError is an OSError
        connection.abort()
        reason = str(error) or f"no {peer} answered within {timeout_s:g} s"
        raise NotConnected(f"cannot connect to {connection.address}: {reason}") from error
    except BaseException:
        connection.abort()
        raise


async def wait_closed(connection: ReconnectableConnection, timeout_s: float) -> None:
    """Wait for the end of a closed connection. Aborts it after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            await connection.ended.wait()
    except TimeoutError:
        connection.abort()
