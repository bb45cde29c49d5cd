"""The bus behind all clients of one URL: a store, and the actions of the native port on it.

There is no event loop. A lock guards the state that only the loop may touch in a server. The
only caller is the user of this process, an admin.

A store URL has one bus per process: the first `open_bus` opens it, the last `close` closes
it. URLs of the same store share a bus (`engine_registry.canonical_url`); the data folder of
a bus names the store in it.

A forked child shares no bus. An inherited client raises an error that names the owner, and
opening the same folder raises `DataFolderInUse`, as in any other process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import RLock, Thread, current_thread
from typing import TYPE_CHECKING, Any, TypeVar

from polybus.bus.alarms import Alarms
from polybus.bus.counters import Counters
from polybus.bus.dialect_registry import installed_dialects
from polybus.bus.policy import ROOT_UID, Policy
from polybus.bus.quotas import Quotas
from polybus.durable.delay_scheduler import DelayScheduler
from polybus.durable.retention import UNREAD_ALARM, Retention
from polybus.durable.topic_names import TopicNames
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import DataFolderInUse, NotSupported
from polybus.groups.reader_positions import read_positions
from polybus.model.identity import Identity
from polybus.model.limits import Limits, NativeLimits, QuotaLimits
from polybus.native.client.client import Client
from polybus.native.inprocess.inprocess_transport import InProcessTransport
from polybus.native.port.native_port import NativePort
from polybus.native.port.topic_access import TopicAccess
from polybus.store.engine_registry import canonical_url, open_store

if TYPE_CHECKING:
    from polybus.store.contract import Store

log = logging.getLogger("polybus.native.inprocess")

FAMILIES = ("dropped", "refused", "faults")  # of counters that a bus inside a process has


class CallbackThread:
    """Runs callbacks in order, on a thread of its own.

    Callbacks of programs must not run on the store's thread: they would delay all commits,
    and a callback that waits for the store would deadlock.
    """

    def __init__(self) -> None:
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="polybus-embedded-answers", daemon=True)
        self._thread.start()

    def add(self, step: Callable[[], None]) -> None:
        self._steps.put(step)

    def close(self) -> None:
        """Run the remaining callbacks, then end the thread."""
        self._steps.put(None)
        if current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step()
            except Exception:  # an error of one callback must not stop the others
                log.exception("callback failed")


T = TypeVar("T")


class InProcessBus:
    """A store with a native port, shared by clients."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pid = os.getpid()
        self.limits = NativeLimits()
        groups = frozenset(os.getgroups())
        self.identity = Identity(uid=os.getuid(), gid=os.getgid(), pid=self.pid, groups=groups)
        self.answers = CallbackThread()
        self._counters = Counters()
        self._store = open_store(url)
        try:
            self.port = self._open_port(self._store)
        except BaseException:
            self._store.close()
            raise

    def close(self) -> None:
        """End waits, finish submitted commits and complete their futures."""
        self.port.close()
        self._delays.stop()
        self._retention.close()
        try:
            self._store.close()
        finally:
            self.answers.close()

    def _open_port(self, store: Store) -> NativePort:
        log = StdlibLog("polybus.native.inprocess")
        quotas = Quotas(QuotaLimits(quota_topics=Limits().max_topics), self._counters, log)
        policy = Policy((ROOT_UID, os.getuid()), reserved=installed_dialects().reserved_topics)
        durable = DurableTopics(store)
        binding = TopicNames(durable, policy, quotas, is_ephemeral=lambda name: False)
        access = TopicAccess(durable, binding, policy, LoopLock())
        alarms = Alarms(time.time_ns, log)
        binding.on_removed.append(durable.delayed.on_dropped)
        self._delays = DelayScheduler(durable, time.monotonic, time.time_ns, alarms)
        self._delays.start()
        port = NativePort(
            access, self.limits, time.monotonic, self._stats, _no_rules, time.time_ns, alarms
        )

        def count_unread(messages: int) -> None:
            access.on_loop(self._counters.count, "dropped", UNREAD_ALARM, messages)

        self._retention = Retention(
            durable, read_positions, alarms, count_unread, time.monotonic, time.time_ns
        )
        self._retention.start()
        return port

    def _stats(self) -> dict[str, Any]:
        families = {family: self._counters.family(family) for family in FAMILIES}
        return {**families, "topics": self.port.access.durable.count}


class LoopLock:
    """Runs functions one at a time, in place of the event loop of a server."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T:
        with self._lock:
            return function(*args)


class StdlibLog:
    """The log interface of the bus on top of `logging`."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        self._log.debug("%s %s", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log.info("%s %s", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log.warning("%s %s", event, fields)


def _no_rules(verb: str, request: Mapping[str, object], caller: Identity) -> Any:
    raise NotSupported("a bus inside a process has no access rules; its user is an admin")


@dataclass(slots=True)
class _SharedBus:
    core: InProcessBus
    users: int = 0


_guard = threading.Lock()
_shared: dict[str, _SharedBus] = {}


def open_bus(url: str) -> Client:
    """Return a client of the bus of this URL; open the bus if this is its first client."""
    place = canonical_url(url)
    with _guard:
        shared = _shared.get(place)
        if shared is None:
            try:
                shared = _shared[place] = _SharedBus(InProcessBus(place))
            except DataFolderInUse as error:
                text = f"{error}: run `polybus serve` there, and use polybus://HOST:PORT"
                raise DataFolderInUse(text) from None
        shared.users += 1
        on_close = partial(_release_bus, place, shared)
        return Client(url, transport=InProcessTransport(shared.core, on_close))


def _release_bus(place: str, shared: _SharedBus) -> None:
    """Close the bus if this was its last client."""
    with _guard:  # until the store is closed, so that the next open finds the folder free
        shared.users -= 1
        if not shared.users:
            del _shared[place]
            shared.core.close()


def _after_fork() -> None:
    """Drop the buses of the parent, and a lock that one of its threads may have held."""
    global _guard
    _guard = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)
