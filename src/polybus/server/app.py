"""The bus as a process: the one file that knows all.

It starts all or nothing. Everything that is opened (the data folder's lock, each
listener, each socket file) goes on one stack, and whatever ends the run, a taken
port at the start or a SIGTERM after a year, unwinds it. Only when all listeners
are open does it say so, one line each and then `ready`.

An error that nobody foresaw is logged and counted, and the bus goes on: one
connection's trouble is not everyone's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from polybus import __version__
from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.bus.broker import Broker
from polybus.bus.policy import Policy
from polybus.dialects.pirate.server.subscriber_admin import SubscriberAdmin
from polybus.errors import ConfigError
from polybus.model.address import Address
from polybus.model.identity import Identity
from polybus.server import folders, process_tuning, socket_files
from polybus.server.acl_admin import AclAdmin
from polybus.server.acl_file import ACL_NAME
from polybus.server.admin import ROOT_UID, AdminServer
from polybus.server.dialect_registry import NATIVE, PIRATE
from polybus.server.durable_service import DurableService
from polybus.server.folder_lock import FolderLock
from polybus.server.lifecycle import Lifecycle, Ticker
from polybus.server.listener_plan import ListenerSpec
from polybus.server.logs import Logs
from polybus.server.program import ServerPlan, locate_curve_keys
from polybus.server.stream_server import StreamServer
from polybus.server.switch_interval import SwitchInterval
from polybus.server.systemd_notify import SystemdNotifier
from polybus.server.user_directory import UserDirectory

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.pirate_server import PirateServer

SHUTDOWN = "shutdown"
UNEXPECTED = "unexpected_error"


def run(program: ServerPlan) -> int:
    """Serve until told to stop; the exit code. Raises what kept the bus from starting."""
    descriptors = process_tuning.prepare_process()
    logs = Logs(program.loaded.settings.log, time.monotonic)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(App(program, logs, descriptors).serve())
    finally:
        logs.close()
    return 0


class OpenedListener(Protocol):
    """What is common to the listeners of all dialects."""

    address: Address

    def close(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...


Open = Callable[[AsyncExitStack, ListenerSpec], Awaitable[OpenedListener]]


class App:
    """One bus. `live` is its whole life."""

    def __init__(
        self, program: ServerPlan, logs: Logs, descriptors: process_tuning.DescriptorLimit
    ) -> None:
        self._program = program
        self._settings = program.loaded.settings
        self._logs = logs
        self._log = logs.logger
        self._descriptors = descriptors
        self._limits = process_tuning.fit_limits(self._settings.limits, descriptors)
        self._notifier = SystemdNotifier(os.environ, self._log)
        self._listeners: list[tuple[str, OpenedListener]] = []

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        directory = UserDirectory(time.monotonic)
        self._broker = Broker(
            self._limits,
            time.monotonic,
            loop.call_soon,
            self._log,
            wall_ns=time.time_ns,
            freud=self._settings.freud,
            policy=Policy((ROOT_UID, self._program.uid), directory.groups_of),
        )
        self._broker.quotas.describe = directory.describe
        self._acl = self._open_acl()
        self._admin = self._open_admin()
        self._streams = StreamServer(
            self._broker,
            self._settings,
            self._limits.max_connections,
            self._program.uid,
            self._log,
            self._program.listeners,
            self._admin.open,
        )
        shared = self._streams.shared
        self._turns = turns = SwitchInterval(self._count_received)
        self._durable_service = DurableService(
            self._broker, self._settings, self._log, lambda: turns.note_reads(shared.reads)
        )
        self._pirate_server: PirateServer | None = None
        lifecycle = Lifecycle(self._reload, self._log, self._logs.close)
        async with AsyncExitStack() as stack:
            lifecycle.watch()  # first: a SIGTERM while starting is a clean stop, too
            await self._start(stack)
            self._announce()
            await lifecycle.until_stopped()
            self._notifier.stopping()
            await self._drain()
        self._log.info("stopped")

    async def _start(self, stack: AsyncExitStack) -> None:
        if self._program.data is not None:
            folders.prepare_data(self._program.data, self._program.uid)
            stack.enter_context(FolderLock(self._program.data))
        if self._program.engine is not None:
            stack.push_async_callback(self._durable_service.close)
            await self._durable_service.open(self._program.engine)
        self._acl.start(self._program.loaded)
        await self._start_listeners(stack)
        steps = (self._broker.tick, self._admin.tick, self._logs.tick, self._turns.tick)
        ticker = Ticker(steps, partial(self._fault, "timer"))
        ticker.start()
        stack.callback(ticker.stop)
        stack.callback(self._streams.close)

    def _count_received(self) -> int:
        """Counts what the loop's connections bring: reads, and requests of pirates."""
        pirates = sum(one.received for one in self._broker.overview.other_totals)
        return self._streams.shared.reads + pirates

    async def _start_listeners(self, stack: AsyncExitStack) -> None:
        own: dict[str, Open] = {NATIVE: self._open_port, PIRATE: self._open_pirate}
        for wanted in self._program.listeners:
            open_one = own.get(wanted.dialect, self._streams.listen)
            self._listeners.append((wanted.dialect, await open_one(stack, wanted)))

    async def _open_port(self, stack: AsyncExitStack, wanted: ListenerSpec) -> OpenedListener:
        side, on_fault = self._durable_service, partial(self._fault, "native")
        listener = await asyncio.to_thread(
            side.listen, wanted.address, self._stats, self._acl.verbs(), on_fault
        )
        stack.push_async_callback(listener.drain, 0)
        return listener

    async def _open_pirate(self, stack: AsyncExitStack, wanted: ListenerSpec) -> OpenedListener:
        if self._pirate_server is None:
            from polybus.dialects.pirate.server.pirate_server import PirateServer

            subscribers, gate = self._durable_service.subscribers, self._streams.connection_limit
            assert subscribers is not None
            keys = locate_curve_keys(self._program.loaded, os.environ)
            self._pirate_server = side = PirateServer(
                self._broker, subscribers, self._settings, gate, keys, self._log
            )
            stack.push_async_callback(side.close)
            await side.open()
        with socket_files.prepared_path(stack, wanted, self._program.uid):
            listener = self._pirate_server.listen(wanted.address)
        stack.push_async_callback(listener.drain, 0)
        return listener

    def _open_acl(self) -> AclAdmin:
        data, broker = self._program.data, self._broker
        path = None if data is None else data / ACL_NAME
        return AclAdmin(broker.policy, broker.quotas, self._creator_of, path, self._log)

    def _creator_of(self, name: bytes) -> Identity | None:
        binding = self._broker.topic_names
        found = self._broker.topics.creator_of(name)
        return binding.creator_of(name) if found is None and binding else found

    def _open_admin(self) -> AdminServer:
        server = self._settings.server
        return AdminServer(
            {
                "stats": AdminVerb(lambda *_: self._stats(), for_everyone=True),
                "connections": AdminVerb(lambda *_: self._broker.connections()),
                "store_compact": AdminVerb(self._compact, keys=frozenset({"folder"})),
                **self._acl.verbs(),
                **SubscriberAdmin(lambda: self._durable_service).verbs(),
            },
            own_uid=self._program.uid,
            max_connections=server.max_admin_connections,
            idle_timeout_s=server.admin_idle_timeout_s,
            clock=time.monotonic,
            log=self._log,
            made_admin=self._acl.is_admin,
        )

    async def _compact(self, request: Request, _identity: Identity) -> dict[str, Any]:
        """Of the store that the caller means, so that it is not done to another's."""
        own = self._program.engine
        if own is None or f"lmdb:{request.get('folder')}" != own:
            raise AdminError("not_found", f"the store of this bus is {own or 'none'}")
        return await asyncio.to_thread(self._durable_service.compact)

    def _stats(self) -> dict[str, Any]:
        own = {"version": __version__, "pid": os.getpid(), "log_lines_lost": self._logs.dropped}
        return {"server": own, **self._broker.stats()}

    def _announce(self) -> None:
        process_tuning.freeze_heap()
        lines = [f"listening {dialect} {one.address}\n" for dialect, one in self._listeners]
        _print("".join([*lines, "ready\n"]))
        for warning in self._program.loaded.warnings:
            self._log.warning("ignored variable", text=warning)
        self._log.info(
            "started",
            version=__version__,
            pid=os.getpid(),
            max_connections=self._limits.max_connections,
            descriptors=self._descriptors.now,
            descriptors_before=self._descriptors.before,
            data=str(self._program.data or "none"),
        )
        if self._limits.max_connections < self._settings.limits.max_connections:
            self._log.warning("max_connections lowered", reason="too few file descriptors")
        self._notifier.ready(len(self._listeners))

    async def _drain(self) -> None:
        """Accept no one, take nothing more, and give what is owed a bounded time to leave."""
        for _dialect, listener in self._listeners:
            listener.close()
        self._durable_service.release_waiters()
        self._broker.close_all(SHUTDOWN)
        self._admin.close_all()
        timeout_s = self._settings.server.drain_timeout_s
        await asyncio.gather(*(listener.drain(timeout_s) for _, listener in self._listeners))

    async def _reload(self) -> None:
        """SIGHUP: whatever can be read again. What is broken leaves the old in force."""
        again: dict[str, Callable[[], Awaitable[None]]] = {
            "policy": self._reload_policy,
            "native port": partial(asyncio.to_thread, self._durable_service.reload),
        }
        if self._pirate_server is not None:
            again["pirate keys"] = self._pirate_server.reload
        again["certificates"] = self._streams.reload
        self._notifier.reloading()
        for what, reload in again.items():
            try:
                await reload()
            except ConfigError as error:
                self._log.error("reload failed", what=what, reason=str(error))
        self._notifier.ready(len(self._listeners))

    async def _reload_policy(self) -> None:
        rules = await self._acl.reload(self._program.loaded)
        self._log.info("reloaded", what="policy", rules=rules)

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._fault(context.get("message"), context.get("exception"))

    def _fault(self, where: str | None, error: BaseException | None) -> None:
        self._broker.counters.count("faults", UNEXPECTED)
        self._log.error("unexpected error", where=where, exc_info=error)


def _print(text: str) -> None:
    """On stdout, at once. Whoever started us may have closed it: that is no reason to stop."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
