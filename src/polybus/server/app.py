"""The bus as a process: store, dialects, admin socket, signals.

The start is all or nothing. Everything that is opened (the lock of the data folder, each
listener, each socket file) goes on one exit stack, which unwinds whether a port is taken at
the start or a SIGTERM arrives later. When all listeners are open, the process prints one
line for each and then `ready`.

Dialects come from the registry of installed dialects; none is named here.

An unexpected error is logged and counted, and the bus continues: an error on one connection
must not end the others.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from polybus import __version__
from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.bus.broker import Broker
from polybus.bus.dialect import ServerContext
from polybus.bus.dialect_registry import installed_dialects
from polybus.bus.policy import Policy
from polybus.errors import ConfigError
from polybus.model.identity import Identity
from polybus.server import folders, process_tuning, socket_files
from polybus.server.acl_admin import AclAdmin
from polybus.server.acl_file import ACL_NAME
from polybus.server.admin import ROOT_UID, AdminServer
from polybus.server.connections_admin import connections_verb
from polybus.server.durable_service import DurableService
from polybus.server.folder_lock import FolderLock
from polybus.server.lifecycle import Lifecycle, Ticker
from polybus.server.listener_plan import ADMIN
from polybus.server.logs import Logs
from polybus.server.program import ServerPlan
from polybus.server.stream_server import StreamServer
from polybus.server.switch_interval import SwitchInterval
from polybus.server.systemd_notify import SystemdNotifier
from polybus.server.user_directory import UserDirectory
from polybus.transports.descriptor_reserve import descriptor_reserve

if TYPE_CHECKING:
    from polybus.bus.dialect import DialectListener, DialectServer

SHUTDOWN = "shutdown"
UNEXPECTED = "unexpected_error"
# The bus closes surplus connections of libzmq, and libzmq accepts others.
RELOAD_TRIES, RELOAD_RETRY_S = 200, 0.05
RELOAD_DESCRIPTORS = 4  # a file, and a lookup of a user


def run(program: ServerPlan) -> int:
    """Serve until a signal stops the bus. Returns the exit code; raises if it cannot start."""
    descriptors = process_tuning.prepare_process()
    logs = Logs(program.loaded.settings.log, time.monotonic)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(App(program, logs, descriptors).serve())
    finally:
        logs.close()
    return 0


class App:
    """One bus; `serve` runs it from start to stop."""

    def __init__(
        self, program: ServerPlan, logs: Logs, descriptors: process_tuning.DescriptorLimit
    ) -> None:
        self._program = program
        use = process_tuning.DescriptorUse.of(program.listeners)
        self._settings = process_tuning.fit_limits(program.loaded.settings, descriptors, use)
        process_tuning.reserve_streams(self._settings, descriptors, use)
        self._logs = logs
        self._log = logs.logger
        self._descriptors = descriptors
        self._limits = self._settings.limits
        self._notifier = SystemdNotifier(os.environ, self._log)
        self._listeners: list[tuple[str, DialectListener]] = []
        self._servers: dict[str, DialectServer] = {}  # of dialects that listen

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _loop, context: self._fault(context.get("message"), context.get("exception"))
        )
        directory = UserDirectory(time.monotonic)
        self._broker = Broker(
            self._limits,
            time.monotonic,
            loop.call_soon,
            self._log,
            wall_ns=time.time_ns,
            policy=Policy(
                (ROOT_UID, self._program.uid),
                directory.groups_of,
                installed_dialects().reserved_topics,
            ),
        )
        self._broker.quotas.describe = directory.describe
        data = self._program.data
        acl_path = None if data is None else data / ACL_NAME
        broker = self._broker
        self._acl = AclAdmin(broker.policy, broker.quotas, self._creator_of, acl_path, self._log)
        self._streams = StreamServer(
            self._broker,
            self._settings,
            self._limits.max_connections,
            self._program.uid,
            self._log,
            self._program.listeners,
        )
        self._contexts = {one.name: self._context(one.name) for one in installed_dialects()}
        self._admin = self._open_admin()
        shared = self._streams.shared
        self._turns = turns = SwitchInterval(self._count_received)
        self._durable_service = DurableService(
            self._broker, self._settings, lambda: turns.note_reads(shared.reads)
        )
        lifecycle = Lifecycle(self._reload, self._log, self._logs.close)
        async with AsyncExitStack() as stack:
            lifecycle.watch()  # first: a SIGTERM during the start must be a clean stop, too
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
            dialects = [(one, self._contexts[one.name]) for one in installed_dialects()]
            await self._durable_service.open(self._program.engine, dialects)
        self._acl.start(self._program.loaded)
        await self._start_listeners(stack)
        steps = (self._broker.tick, self._admin.tick, self._logs.tick, self._turns.tick)
        connections = self._broker.overview.connections
        ticker = Ticker(steps, partial(self._fault, "timer"), lambda: not connections.count)
        ticker.start()
        stack.callback(ticker.stop)
        stack.callback(self._streams.close)

    def _count_received(self) -> int:
        """Return the reads of stream connections plus the requests of other connections."""
        others = sum(one.received for one in self._broker.overview.other_totals)
        return self._streams.shared.reads + others

    def _context(self, dialect: str) -> ServerContext:
        """Return the parts of this bus that the server side of a dialect may use."""
        return ServerContext(
            broker=self._broker,
            section=self._settings.section(dialect),
            tls=self._settings.tls,
            log=self._log,
            data=self._program.data,
            connections=self._streams.places,
            serve_streams=partial(self._streams.serve, dialect),
            own_places=self._streams.own_places,
            stats=self._stats,
            rule_verbs=self._acl.verbs(),
            on_fault=partial(self._fault, dialect),
        )

    async def _start_listeners(self, stack: AsyncExitStack) -> None:
        for wanted in self._program.listeners:
            server = self._servers.get(wanted.dialect)
            if server is None:
                if wanted.dialect == ADMIN:
                    server = self._streams.serve_admin(self._admin.open)
                else:
                    open_server = installed_dialects()[wanted.dialect].open_server
                    assert open_server is not None  # the listener plan checks it
                    server = await open_server(self._contexts[wanted.dialect])
                self._servers[wanted.dialect] = server
                stack.push_async_callback(server.close)
            with socket_files.prepared_path(stack, wanted, self._program.uid):
                listener = await server.listen(wanted.address)
            stack.push_async_callback(listener.drain, 0)
            stack.callback(listener.close)
            self._listeners.append((wanted.name, listener))

    def _creator_of(self, name: bytes) -> Identity | None:
        return self._broker.topics.creator_of(name) or self._broker.durable.creator_of(name)

    def _open_admin(self) -> AdminServer:
        server = self._settings.server
        dialect_verbs = {
            name: verb
            for dialect in installed_dialects()
            if dialect.admin_verbs is not None
            for name, verb in dialect.admin_verbs(self._contexts[dialect.name]).items()
        }
        return AdminServer(
            {
                "stats": AdminVerb(
                    lambda _, identity: self._stats() | self._alarms(identity), for_everyone=True
                ),
                "alarms": AdminVerb(lambda _, identity: self._alarms(identity)),
                "connections": connections_verb(self._broker.overview.connections),
                "store_compact": AdminVerb(self._compact, keys=frozenset({"folder"})),
                **self._acl.verbs(),
                **dialect_verbs,
            },
            own_uid=self._program.uid,
            max_connections=server.max_admin_connections,
            idle_timeout_s=server.admin_idle_timeout_s,
            clock=time.monotonic,
            log=self._log,
            made_admin=self._acl.is_admin,
            user_share=self._limits.user_share,
            on_refused=partial(self._broker.counters.count, "refused"),
        )

    async def _compact(self, request: Request, _identity: Identity) -> dict[str, Any]:
        """Compact the store, if it is the one that the caller named."""
        own = self._program.engine
        if own is None or request.get("folder") != own.partition(":")[2]:
            raise AdminError("not_found", f"the store of this bus is {own or 'none'}")
        return await asyncio.to_thread(self._durable_service.compact)

    def _stats(self) -> dict[str, Any]:
        own = {"version": __version__, "pid": os.getpid(), "log_lines_lost": self._logs.dropped}
        return {"server": own, **self._broker.stats()}

    def _alarms(self, identity: Identity) -> dict[str, Any]:
        with_names = self._admin.is_admin(identity)
        return {"alarms": self._broker.alarms.to_json(with_names=with_names)}

    def _announce(self) -> None:
        process_tuning.freeze_heap()
        lines = [f"listening {dialect} {one.address}\n" for dialect, one in self._listeners]
        _print("".join([*lines, "ready\n"]))
        for reason in installed_dialects().skipped:
            self._log.warning("dialect skipped", reason=reason)
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
        if self._settings is not self._program.loaded.settings:
            self._log.warning("max_connections lowered", reason="too few file descriptors")
        self._notifier.ready(len(self._listeners))

    async def _drain(self) -> None:
        """Stop accepting and reading; give pending output a bounded time to be sent."""
        for _dialect, listener in self._listeners:
            listener.close()
        for server in self._servers.values():
            server.stop()
        self._broker.close_all(SHUTDOWN)
        self._admin.close_all()
        timeout_s = self._settings.server.drain_timeout_s
        await asyncio.gather(*(listener.drain(timeout_s) for _, listener in self._listeners))

    async def _reload(self) -> None:
        """Read all files again (SIGHUP). An invalid file leaves the former values in force."""
        again: dict[str, Callable[[], Awaitable[None]]] = {"policy": self._reload_policy}
        again.update((name, server.reload) for name, server in self._servers.items())
        again["certificates"] = self._streams.reload
        self._notifier.reloading()
        for what, reload in again.items():
            try:
                await _read_again(reload)
            except ConfigError as error:
                self._log.error("reload failed", what=what, reason=str(error))
        self._notifier.ready(len(self._listeners))

    async def _reload_policy(self) -> None:
        rules = await self._acl.reload(self._program.loaded)
        self._log.info("reloaded", what="policy", rules=rules)

    def _fault(self, where: str | None, error: BaseException | None) -> None:
        self._broker.counters.count("faults", UNEXPECTED)
        self._log.error("unexpected error", where=where, exc_info=error)


async def _read_again(reload: Callable[[], Awaitable[None]]) -> None:
    """Reload a part; try again if no descriptor was free. Raises `ConfigError`.

    Otherwise a caller could keep a revoked right or token by a flood of connections.
    """
    for tries_left in reversed(range(RELOAD_TRIES)):
        try:
            with descriptor_reserve.borrow(RELOAD_DESCRIPTORS):
                await reload()
            return
        except ConfigError as error:
            cause = error.__context__
            if not (tries_left and isinstance(cause, OSError) and cause.errno == errno.EMFILE):
                raise
        await asyncio.sleep(RELOAD_RETRY_S)


def _print(text: str) -> None:
    """Print on stdout and flush. A closed stdout must not stop the bus."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
