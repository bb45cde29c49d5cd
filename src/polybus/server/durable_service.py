"""Everything durable of a running bus: the store, what stands on it, and the native port."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError
from polybus.dialects.pirate.server.durable_subscribers import DurableSubscribers, StoredSubscribers
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext
from polybus.errors import ConfigError, PolybusError, Unavailable, error_from_code
from polybus.native.port.native_port import NativePort
from polybus.native.port.topic_access import TopicAccess
from polybus.server.loop_threads import (
    ANSWER_TIMEOUT_S,
    WORKERS,
    CompletionQueue,
    LoopCaller,
    WorkerPool,
)
from polybus.store.engine_registry import open_store

if TYPE_CHECKING:
    from polybus.bus.admin_verb import AdminVerb
    from polybus.bus.broker import Broker
    from polybus.durable.publisher import CallOnLoop
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.address import Address
    from polybus.model.identity import Identity
    from polybus.server.settings import Settings
    from polybus.store.contract import Store
    from polybus.store.lmdb.lmdb_store import LmdbStore
    from polybus.transports.flight.flight_listener import FlightListener


# The admin socket's words for what the tree of errors calls otherwise.
CODES = {"not_found": "does_not_exist", "bad_request": "malformed_request"}


class DurableService:
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
        self.durable: DurableTopics | None = None
        self.subscribers: DurableSubscribers | None = None
        self._port: NativePort | None = None
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
            lmdb.yield_to(self._reads)
        loop = asyncio.get_running_loop()
        completions = CompletionQueue(loop)
        readers = WorkerPool(completions)
        self._stack.callback(readers.close)
        await asyncio.to_thread(self._broker.attach_store, self.store, completions.call, readers)
        workers = WorkerPool(completions, WORKERS)
        self._stack.callback(workers.close)
        self.subscribers = await self._open_subscribers(completions.call, workers)
        self._on_loop = LoopCaller(loop)
        self._loop = loop
        self._run_on_loop_later = completions.call

    async def _open_subscribers(self, soon: CallOnLoop, workers: WorkerPool) -> DurableSubscribers:
        """Whether or not pirates are served: they hold back what is not to be collected."""
        broker = self._broker
        assert broker.durable is not None
        assert broker.topic_names is not None
        self.durable = broker.durable
        means = SubscriberContext(
            broker.durable,
            broker.topic_names,
            broker.policy,
            broker.counters,
            self._settings.pirate,
            soon,
            workers,
            time.monotonic,
            time.time_ns,
            self._log,
        )
        subscribers = DurableSubscribers(means, await asyncio.to_thread(StoredSubscribers, means))
        broker.on_tick.append(subscribers.tick)
        broker.overview.sections["pirate"] = subscribers.stats
        return subscribers

    def listen(
        self,
        address: Address,
        stats: Callable[[], dict[str, Any]],
        rules: Mapping[str, AdminVerb],
        on_fault: Callable[[BaseException], None],
    ) -> FlightListener:
        """The native port at an address. One set of verbs serves all of them.

        `stats`, `rules` and `on_fault` are called on the loop.
        """
        from polybus.transports.flight.authentication import TokenFile
        from polybus.transports.flight.flight_listener import (
            FlightListener,
            SecurityOptions,
            SlowConsumerLimits,
        )

        if self._port is None:
            self._port = self._open_port(stats, rules)
        native, tls, limits = self._settings.native, self._settings.tls, self._settings.limits
        tokens = TokenFile(native.tokens, time.time)
        self._reloads.append(tokens.reload)
        listener = FlightListener(
            address,
            self._port,
            native,
            SecurityOptions(tokens, tls.certificate, tls.key, native.client_authorities),
            SlowConsumerLimits(
                limits.slow_consumer_timeout_s, limits.slow_consumer_min_bytes_per_s
            ),
            time.monotonic,
            lambda: time.time_ns() // 1_000_000,
            self._log,
            lambda error: self._run_on_loop_later(lambda: self._on_port_error(error, on_fault)),
            lambda reason: self._run_on_loop_later(
                lambda: self._broker.counters.count("closed", reason)
            ),
        )
        self._reloads.append(listener.reload)
        return listener

    def _on_port_error(self, error: Exception, on_fault: Callable[[BaseException], None]) -> None:
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

    def release_waiters(self) -> None:
        """Lets go of whoever waits: the bus is stopping."""
        if self._port is not None:
            self._port.close()

    async def close(self) -> None:
        self.release_waiters()
        await asyncio.to_thread(self._stack.close)

    def compact(self) -> dict[str, Any]:
        """Gives back the room of what was removed; blocks, for as long as that takes."""
        lmdb = self._lmdb()
        if lmdb is None:
            raise AdminError("not_supported", "only a store on LMDB can be compacted")
        try:
            before, after = lmdb.compact()
        except PolybusError as error:
            raise AdminError(error.code, str(error)) from None
        return {"before_bytes": before, "after_bytes": after}

    def _lmdb(self) -> LmdbStore | None:
        """The store as what it can do beyond the contract, if it is LMDB's."""
        from polybus.store.lmdb.lmdb_store import LmdbStore

        return self.store if isinstance(self.store, LmdbStore) else None

    def _open_port(
        self, stats: Callable[[], dict[str, Any]], rules: Mapping[str, AdminVerb]
    ) -> NativePort:
        broker = self._broker
        assert broker.durable is not None
        assert broker.topic_names is not None
        access = TopicAccess(broker.durable, broker.topic_names, broker.policy, self._on_loop)
        asked = AdminRules(rules, self._loop)
        port = NativePort(access, self._settings.native, time.monotonic, stats, asked, time.time_ns)
        self._stack.callback(port.groups.stop)
        return port


class AdminRules:
    """The admin socket's verbs about rules, for other threads, with errors of the tree."""

    def __init__(self, verbs: Mapping[str, AdminVerb], loop: asyncio.AbstractEventLoop) -> None:
        self._verbs = verbs
        self._loop = loop

    def __call__(self, verb: str, request: Mapping[str, object], caller: Identity) -> Any:
        asking = self._ask(verb, dict(request), caller)
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop).result(ANSWER_TIMEOUT_S)
        except AdminError as error:
            raise error_from_code(CODES.get(error.code, error.code), str(error)) from None
        except (TimeoutError, RuntimeError):
            asking.close()
            raise Unavailable("the bus did not get round to it: try again") from None

    async def _ask(self, verb: str, request: dict[str, Any], caller: Identity) -> Any:
        answer = self._verbs[verb].answer(request, caller)
        return await answer if inspect.isawaitable(answer) else answer
