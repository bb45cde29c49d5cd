"""The store of a running bus: opened before the listeners, closed after them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError
from polybus.durable.durable_bus import attach_store
from polybus.durable.retention import UNREAD_ALARM, Retention
from polybus.errors import PolybusError
from polybus.groups.reader_positions import read_positions
from polybus.server.loop_threads import WORKERS, CompletionQueue, LoopCaller, WorkerPool
from polybus.store.engine_registry import open_store

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.dialect import Dialect, ServerContext
    from polybus.durable.topic_registry import DurableTopics
    from polybus.server.settings import Settings
    from polybus.store.contract import Store


class DurableService:
    """The store, the threads that wait for it, and the durable topics of the broker."""

    def __init__(self, broker: Broker, settings: Settings, reads: Callable[[], int]) -> None:
        """`reads` returns how much the loop's connections have received."""
        self._broker = broker
        self._settings = settings
        self._reads = reads
        self._stack = ExitStack()
        self.store: Store

    async def open(self, url: str, dialects: Iterable[tuple[Dialect, ServerContext]]) -> None:
        """Open the store, then let every installed dialect load its records from it."""
        settings = self._settings
        self.store = await asyncio.to_thread(
            open_store,
            url,
            durability=settings.durability,
            commit_interval_ms=settings.commit_interval_ms,
        )
        self._stack.callback(self.store.close)
        self.store.yield_to(self._reads)
        loop = asyncio.get_running_loop()
        completions = CompletionQueue(loop)
        readers = WorkerPool(completions)
        self._stack.callback(readers.close)
        durable = await asyncio.to_thread(
            attach_store, self._broker, self.store, completions.call, readers
        )
        durable.topics.default_settings = settings.durable.topic_settings()
        self._start_retention(durable.topics, completions)
        self._stack.callback(durable.close)
        workers = WorkerPool(completions, WORKERS)
        self._stack.callback(workers.close)
        for dialect, context in dialects:
            context.call_on_loop = completions.call
            context.run_on_loop = LoopCaller(loop)
            context.workers = workers
            # Also of dialects that do not listen: their records may hold back collection.
            if dialect.attach_store is not None:
                context.attached = await dialect.attach_store(context)

    def _start_retention(self, topics: DurableTopics, completions: CompletionQueue) -> None:
        counters = self._broker.counters

        def count_unread(messages: int) -> None:
            completions.call(lambda: counters.count("dropped", UNREAD_ALARM, messages))

        retention = Retention(
            topics,
            read_positions,
            self._broker.alarms,
            count_unread,
            time.monotonic,
            self._broker.wall_ns,
        )
        self._stack.callback(retention.close)
        retention.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._stack.close)

    def compact(self) -> dict[str, Any]:
        """Free the space of removed data. Blocks until it is done."""
        try:
            before, after = self.store.compact()
        except PolybusError as error:
            raise AdminError(error.code, str(error)) from None
        return {"before_bytes": before, "after_bytes": after}
