"""The bus behind all handles of one URL: a store, and the native port's verbs on it.

There is no loop here: what only the loop may touch in a server is touched under a lock.
The one caller is the process's own user, who is admin of everything.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from polybus.bus.counters import Counters
from polybus.bus.policy import ROOT_UID, Policy
from polybus.bus.quotas import Quotas
from polybus.durable.topic_names import TopicNames
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import NotSupported
from polybus.model.identity import Identity
from polybus.model.limits import Limits, NativeLimits, QuotaLimits
from polybus.native.inprocess.callback_thread import CallbackThread
from polybus.native.port.native_port import NativePort
from polybus.native.port.topic_access import TopicAccess
from polybus.store.engine_registry import open_store

if TYPE_CHECKING:
    from polybus.store.contract import Store

T = TypeVar("T")


class InProcessBus:
    """Opened by the first handle, closed by the last."""

    def __init__(self, url: str) -> None:
        self.pid = os.getpid()
        self.limits = NativeLimits()
        self.identity = _own_identity()
        self.answers = CallbackThread()
        self._counters = Counters()
        self._store = open_store(url)
        try:
            self.port = self._open_port(self._store)
        except BaseException:
            self._store.close()
            raise

    def close(self) -> None:
        """Whoever waits is let go; what was handed over is finished, and told."""
        self.port.close()
        try:
            self._store.close()
        finally:
            self.answers.close()

    def _open_port(self, store: Store) -> NativePort:
        quotas = Quotas(
            QuotaLimits(quota_topics=Limits().max_topics),
            self._counters,
            StdlibLog("polybus.native.inprocess"),
        )
        policy = Policy((ROOT_UID, os.getuid()))
        durable = DurableTopics(store)
        binding = TopicNames(durable, policy, quotas, is_ephemeral=lambda name: False)
        access = TopicAccess(durable, binding, policy, LoopLock())
        return NativePort(access, self.limits, time.monotonic, self._stats, _no_rules, time.time_ns)

    def _stats(self) -> dict[str, Any]:
        families = {family: self._counters.family(family) for family in ("refused", "faults")}
        return {**families, "topics": self.port.access.durable.count}


class LoopLock:
    """One at a time: what is the loop's in a server is under this lock here."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T:
        with self._lock:
            return function(*args)


class StdlibLog:
    """The bus's words, for Python's own logging."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        self._log.debug("%s %s", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log.info("%s %s", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log.warning("%s %s", event, fields)


def _own_identity() -> Identity:
    groups = frozenset(os.getgroups())
    return Identity(uid=os.getuid(), gid=os.getgid(), pid=os.getpid(), groups=groups)


def _no_rules(verb: str, request: Mapping[str, object], caller: Identity) -> Any:
    raise NotSupported("a bus inside a process has no rules: its one user may do everything")
