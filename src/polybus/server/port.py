"""Everything durable of a running bus: the store, what stands on it, and the native port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from polybus.bus.port.access import Access
from polybus.bus.port.verbs import Port
from polybus.server.threads import Completions, OnLoop, Readers
from polybus.store.opening import open_store

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.model.address import Address
    from polybus.server.settings import Settings
    from polybus.store.contract import Store
    from polybus.transports.flight.listener import FlightListener


class DurableSide:
    """Opened before the listeners, closed behind them."""

    def __init__(self, broker: Broker, settings: Settings, log: Any) -> None:
        self._broker = broker
        self._settings = settings
        self._log = log
        self._stack = ExitStack()
        self.store: Store
        self._port: Port | None = None
        self._reloads: list[Callable[[], None]] = []

    async def open(self, url: str) -> None:
        settings = self._settings
        self.store = await asyncio.to_thread(
            open_store,
            url,
            durability=settings.durability,
            commit_interval_ms=settings.commit_interval_ms,
        )
        self._stack.callback(self.store.close)
        loop = asyncio.get_running_loop()
        completions = Completions(loop)
        readers = Readers(completions)
        self._stack.callback(readers.close)
        await asyncio.to_thread(self._broker.keep, self.store, completions.add, readers)
        self._on_loop = OnLoop(loop)

    def listen(
        self,
        address: Address,
        stats: Callable[[], dict[str, Any]],
        on_fault: Callable[[BaseException], None],
    ) -> FlightListener:
        """The native port at an address. One set of verbs serves all of them."""
        from polybus.transports.flight.listener import FlightListener, Security
        from polybus.transports.flight.who import Tokens

        if self._port is None:
            self._port = self._open_port(stats)
        native, tls = self._settings.native, self._settings.tls
        tokens = Tokens(native.tokens, time.time)
        self._reloads.append(tokens.reload)
        return FlightListener(
            address,
            self._port,
            native,
            Security(tokens, tls.certificate, tls.key, native.client_authorities),
            self._settings.limits.slow_consumer_timeout_s,
            time.monotonic,
            lambda: time.time_ns() // 1_000_000,
            self._log,
            on_fault,
            lambda reason: self._broker.counters.count("closed", reason),
        )

    def reload(self) -> None:
        """SIGHUP: the tokens are read again; `ConfigError` if they are no good."""
        for again in self._reloads:
            again()

    def release(self) -> None:
        """Lets go of whoever waits: the bus is stopping."""
        if self._port is not None:
            self._port.close()

    async def close(self) -> None:
        self.release()
        await asyncio.to_thread(self._stack.close)

    def _open_port(self, stats: Callable[[], dict[str, Any]]) -> Port:
        broker = self._broker
        assert broker.durable is not None
        assert broker.binding is not None
        access = Access(broker.durable, broker.binding, broker.policy, self._on_loop)
        return Port(access, self._settings.native, time.monotonic, stats)
