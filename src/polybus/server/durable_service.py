"""Everything durable of a running bus: the store, what stands on it, and the native port."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from polybus.dialects.pirate.server.durable_subscribers import Recovered, Subscribers
from polybus.dialects.pirate.server.subscriber_context import Means
from polybus.errors import ConfigError, PolybusError, Unavailable, from_code
from polybus.native.port.native_port import Port
from polybus.native.port.topic_access import Access
from polybus.server.admin import Wrong
from polybus.server.loop_threads import ANSWER_TIMEOUT_S, WORKERS, Completions, OnLoop, Readers
from polybus.store.engine_registry import open_store

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.durable.publisher import Soon
    from polybus.durable.topic_registry import Durable
    from polybus.model.address import Address
    from polybus.model.identity import Identity
    from polybus.server.admin import Verb
    from polybus.server.settings import Settings
    from polybus.store.contract import Store
    from polybus.store.lmdb.lmdb_store import LmdbStore
    from polybus.transports.flight.flight_listener import FlightListener


# The admin socket's words for what the tree of errors calls otherwise.
CODES = {"not_found": "does_not_exist", "bad_request": "malformed_request"}


class DurableSide:
    """Opened before the listeners, closed behind them."""

    def __init__(
        self, broker: Broker, settings: Settings, log: Any, reads: Callable[[], int]
    ) -> None:
        """`reads` counts what connections of the loop have brought."""
        self._broker = broker
        self._settings = settings
        self._log = log
        self._reads = reads
        self._stack = ExitStack()
        self.store: Store
        self.durable: Durable | None = None
        self.subscribers: Subscribers | None = None
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
        if (lmdb := self._lmdb()) is not None:
            lmdb.give_way(self._reads)
        loop = asyncio.get_running_loop()
        completions = Completions(loop)
        readers = Readers(completions)
        self._stack.callback(readers.close)
        await asyncio.to_thread(self._broker.keep, self.store, completions.add, readers)
        workers = Readers(completions, WORKERS)
        self._stack.callback(workers.close)
        self.subscribers = await self._open_subscribers(completions.add, workers)
        self._on_loop = OnLoop(loop)
        self._loop = loop
        self._soon = completions.add

    async def _open_subscribers(self, soon: Soon, workers: Readers) -> Subscribers:
        """Whether or not pirates are served: they hold back what is not to be collected."""
        broker = self._broker
        assert broker.durable is not None
        assert broker.binding is not None
        self.durable = broker.durable
        means = Means(
            broker.durable,
            broker.binding,
            broker.policy,
            broker.counters,
            self._settings.pirate,
            soon,
            workers,
            time.monotonic,
            time.time_ns,
            self._log,
        )
        subscribers = Subscribers(means, await asyncio.to_thread(Recovered, means))
        broker.on_tick.append(subscribers.tick)
        broker.overview.sections["pirate"] = subscribers.stats
        return subscribers

    def listen(
        self,
        address: Address,
        stats: Callable[[], dict[str, Any]],
        rules: Mapping[str, Verb],
        on_fault: Callable[[BaseException], None],
    ) -> FlightListener:
        """The native port at an address. One set of verbs serves all of them.

        `stats`, `rules` and `on_fault` are called on the loop.
        """
        from polybus.transports.flight.authentication import Tokens
        from polybus.transports.flight.flight_listener import FlightListener, Security, Slow

        if self._port is None:
            self._port = self._open_port(stats, rules)
        native, tls, limits = self._settings.native, self._settings.tls, self._settings.limits
        tokens = Tokens(native.tokens, time.time)
        self._reloads.append(tokens.reload)
        listener = FlightListener(
            address,
            self._port,
            native,
            Security(tokens, tls.certificate, tls.key, native.client_authorities),
            Slow(limits.slow_consumer_timeout_s, limits.slow_consumer_min_bytes_per_s),
            time.monotonic,
            lambda: time.time_ns() // 1_000_000,
            self._log,
            lambda error: self._soon(lambda: self._note(error, on_fault)),
            lambda reason: self._soon(lambda: self._broker.counters.count("closed", reason)),
        )
        self._reloads.append(listener.reload)
        return listener

    def _note(self, error: Exception, on_fault: Callable[[BaseException], None]) -> None:
        """What the port has told a client; only what is nobody's answer is a fault of ours."""
        if isinstance(error, PolybusError):
            self._broker.counters.count("refused", f"native_{error.code}")
        else:
            on_fault(error)

    def reload(self) -> None:
        """SIGHUP: tokens and certificates are read again; `ConfigError` if they are no good."""
        wrong: list[ConfigError] = []
        for again in self._reloads:
            try:
                again()
            except ConfigError as error:
                wrong.append(error)
        if wrong:
            raise ConfigError("; ".join(map(str, wrong)))

    def release(self) -> None:
        """Lets go of whoever waits: the bus is stopping."""
        if self._port is not None:
            self._port.close()

    async def close(self) -> None:
        self.release()
        await asyncio.to_thread(self._stack.close)

    def compact(self) -> dict[str, Any]:
        """Gives back the room of what was removed; blocks, for as long as that takes."""
        lmdb = self._lmdb()
        if lmdb is None:
            raise Wrong("not_supported", "only a store on LMDB can be compacted")
        try:
            before, after = lmdb.compact()
        except PolybusError as error:
            raise Wrong(error.code, str(error)) from None
        return {"before_bytes": before, "after_bytes": after}

    def _lmdb(self) -> LmdbStore | None:
        """The store as what it can do beyond the contract, if it is LMDB's."""
        from polybus.store.lmdb.lmdb_store import LmdbStore

        return self.store if isinstance(self.store, LmdbStore) else None

    def _open_port(self, stats: Callable[[], dict[str, Any]], rules: Mapping[str, Verb]) -> Port:
        broker = self._broker
        assert broker.durable is not None
        assert broker.binding is not None
        access = Access(broker.durable, broker.binding, broker.policy, self._on_loop)
        asked = Rules(rules, self._loop)
        port = Port(access, self._settings.native, time.monotonic, stats, asked, time.time_ns)
        self._stack.callback(port.groups.stop)
        return port


class Rules:
    """The admin socket's verbs about rules, for other threads, with errors of the tree."""

    def __init__(self, verbs: Mapping[str, Verb], loop: asyncio.AbstractEventLoop) -> None:
        self._verbs = verbs
        self._loop = loop

    def __call__(self, verb: str, request: Mapping[str, object], caller: Identity) -> Any:
        asking = self._ask(verb, dict(request), caller)
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop).result(ANSWER_TIMEOUT_S)
        except Wrong as error:
            raise from_code(CODES.get(error.code, error.code), str(error)) from None
        except (TimeoutError, RuntimeError):
            asking.close()
            raise Unavailable("the bus did not get round to it: try again") from None

    async def _ask(self, verb: str, request: dict[str, Any], caller: Identity) -> Any:
        answer = self._verbs[verb].answer(request, caller)
        return await answer if inspect.isawaitable(answer) else answer
