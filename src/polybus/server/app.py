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
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from polybus import __version__
from polybus.bus.broker import Broker
from polybus.bus.policy import Policy
from polybus.bus.quotas import Places
from polybus.errors import ConfigError
from polybus.kernel.inbox import SharedBuffer
from polybus.model.address import Address
from polybus.model.identity import Identity
from polybus.server import host, runtime, sockets
from polybus.server.acl import Acl
from polybus.server.aclfile import ACL_NAME
from polybus.server.admin import ROOT_UID, AdminDesk, Request, Verb, Wrong
from polybus.server.dialects import ADMIN, DIALECTS, NATIVE, PIRATE
from polybus.server.directory import Directory
from polybus.server.lifecycle import Lifecycle, Ticker
from polybus.server.listening import Wanted
from polybus.server.lock import FolderLock
from polybus.server.logs import Logs
from polybus.server.notify import Notifier
from polybus.server.pirateadmin import SubscriberVerbs
from polybus.server.port import DurableSide
from polybus.server.program import Program, pirate_keys
from polybus.server.tls import Certificates
from polybus.server.turns import Turns
from polybus.transports.hangups import Hangups
from polybus.transports.stream import Gate, ListenOptions, OpenSession, listen

if TYPE_CHECKING:
    from polybus.server.pirate import PirateSide

SHUTDOWN = "shutdown"
UNEXPECTED = "unexpected_error"


def run(program: Program) -> int:
    """Serve until told to stop; the exit code. Raises what kept the bus from starting."""
    descriptors = host.tune()
    logs = Logs(program.loaded.settings.log, time.monotonic)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(App(program, logs, descriptors).live())
    finally:
        logs.close()
    return 0


class OpenListener(Protocol):
    """What is common to the listeners of all dialects."""

    address: Address

    def close(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...


class App:
    """One bus. `live` is its whole life."""

    def __init__(self, program: Program, logs: Logs, descriptors: host.Descriptors) -> None:
        self._program = program
        self._settings = program.loaded.settings
        self._logs = logs
        self._log = logs.logger
        self._descriptors = descriptors
        self._limits = host.fit(self._settings.limits, descriptors)
        self._notifier = Notifier(os.environ, self._log)
        self._certificates = self._load_certificates()
        self._listeners: list[tuple[str, OpenListener]] = []
        # One bound for all dialects together; the admin's places are apart, so that a
        # flood of clients cannot keep its owner from looking at it.
        self._gate = Gate(self._limits.max_connections, self._refuse("max_connections"))
        places = self._settings.server.max_admin_connections
        self._admin_gate = Gate(places, self._refuse("max_admin_connections"))
        self._shared = SharedBuffer()
        self._hangups = Hangups()

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        directory = Directory(time.monotonic)
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
        self._desk = self._open_desk()
        shared = self._shared
        self._turns = turns = Turns(self._brought)
        self._durable_side = DurableSide(
            self._broker, self._settings, self._log, lambda: turns.note(shared.reads)
        )
        self._pirate_side: PirateSide | None = None
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
            runtime.prepare_data(self._program.data, self._program.uid)
            stack.enter_context(FolderLock(self._program.data))
        if self._program.engine is not None:
            stack.push_async_callback(self._durable_side.close)
            await self._durable_side.open(self._program.engine)
        self._acl.start(self._program.loaded)
        await self._start_listeners(stack)
        steps = (self._broker.tick, self._desk.tick, self._logs.tick, self._turns.tick)
        ticker = Ticker(steps, self._on_tick_error)
        ticker.start()
        stack.callback(ticker.stop)
        stack.callback(self._hangups.close)

    def _brought(self) -> int:
        """Counts what the loop's connections bring: reads, and requests of pirates."""
        return self._shared.reads + sum(one.received for one in self._broker.overview.other_totals)

    async def _start_listeners(self, stack: AsyncExitStack) -> None:
        openers: dict[str, OpenSession] = {ADMIN: self._desk.open}
        for wanted in self._program.listeners:
            if wanted.dialect == NATIVE:
                await self._open_port(stack, wanted)
                continue
            if wanted.dialect == PIRATE:
                await self._open_pirate(stack, wanted)
                continue
            if wanted.dialect not in openers:
                sessions = DIALECTS[wanted.dialect].sessions
                assert sessions is not None
                opener = openers[wanted.dialect] = sessions(self._broker, self._settings)
                if (close := getattr(opener, "close", None)) is not None:
                    stack.callback(close)
            await self._open(stack, wanted, openers[wanted.dialect])

    async def _open_port(self, stack: AsyncExitStack, wanted: Wanted) -> None:
        side = self._durable_side
        listener = await asyncio.to_thread(
            side.listen, wanted.address, self._stats, self._acl.verbs(), self._on_port_fault
        )
        stack.push_async_callback(listener.drain, 0)
        self._listeners.append((wanted.dialect, listener))

    async def _open_pirate(self, stack: AsyncExitStack, wanted: Wanted) -> None:
        if self._pirate_side is None:
            from polybus.server.pirate import PirateSide

            subscribers = self._durable_side.subscribers
            assert subscribers is not None
            keys = pirate_keys(self._program.loaded, os.environ)
            self._pirate_side = side = PirateSide(
                self._broker, subscribers, self._settings, self._gate, keys, self._log
            )
            stack.push_async_callback(side.close)
            await side.open()
        with self._place(stack, wanted):
            listener = self._pirate_side.listen(wanted.address)
        stack.push_async_callback(listener.drain, 0)
        self._listeners.append((wanted.dialect, listener))

    @contextmanager
    def _place(self, stack: AsyncExitStack, wanted: Wanted) -> Iterator[None]:
        """Where a listener is bound: of a socket file, its folder is made and it is ours."""
        if not wanted.address.is_unix:
            yield
            return
        path = Path(wanted.address.path)
        self._prepare_folder(wanted, path.parent)
        with sockets.claimed(path):
            yield
            stack.callback(sockets.remove, path, sockets.identify(path))

    async def _open(self, stack: AsyncExitStack, wanted: Wanted, opener: OpenSession) -> None:
        options = self._options(wanted)
        with self._place(stack, wanted):
            listener = await listen(wanted.address, opener, options)
        stack.push_async_callback(listener.drain, 0)
        stack.callback(listener.close)
        self._listeners.append((wanted.dialect, listener))

    def _prepare_folder(self, wanted: Wanted, folder: Path) -> None:
        if wanted.listed:
            runtime.prepare_listed(folder, self._program.uid)
        else:
            runtime.prepare_runtime(folder, self._program.uid)

    def _options(self, wanted: Wanted) -> ListenOptions:
        counted = wanted.dialect != ADMIN and DIALECTS[wanted.dialect].counts_places
        return ListenOptions(
            gate=self._admin_gate if wanted.dialect == ADMIN else self._gate,
            shared=self._shared,
            tls=self._certificates.context if self._certificates else None,
            unix_mode=runtime.socket_mode(self._program.uid),
            hangups=self._hangups,
            places=Places(self._broker.quotas) if counted else None,
            unshaken=self._unshaken,
        )

    def _refuse(self, setting: str) -> Callable[[str], None]:
        """What happens to a connection over a limit, besides being closed."""

        def refused(peer: str) -> None:
            self._broker.counters.count("refused", setting)
            self._log.warning("connection refused", peer=peer, reason=setting)

        return refused

    def _unshaken(self, peer: str, reason: str) -> None:
        self._broker.counters.count("refused", "tls_handshake")
        self._log.warning("tls handshake failed", peer=peer, reason=reason)

    def _load_certificates(self) -> Certificates | None:
        if any(wanted.address.is_encrypted for wanted in self._program.listeners):
            return Certificates(self._settings.tls)
        return None

    def _open_acl(self) -> Acl:
        data, broker = self._program.data, self._broker
        path = None if data is None else data / ACL_NAME
        return Acl(broker.policy, broker.quotas, self._creator_of, path, self._log)

    def _creator_of(self, name: bytes) -> Identity | None:
        binding = self._broker.binding
        found = self._broker.topics.creator_of(name)
        return binding.creator_of(name) if found is None and binding else found

    def _open_desk(self) -> AdminDesk:
        server = self._settings.server
        return AdminDesk(
            {
                "stats": Verb(lambda *_: self._stats(), for_everyone=True),
                "connections": Verb(lambda *_: self._broker.connections()),
                "store_compact": Verb(self._compact, keys=frozenset({"folder"})),
                **self._acl.verbs(),
                **SubscriberVerbs(lambda: self._durable_side).verbs(),
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
            raise Wrong("not_found", f"the store of this bus is {own or 'none'}")
        return await asyncio.to_thread(self._durable_side.compact)

    def _stats(self) -> dict[str, Any]:
        own = {"version": __version__, "pid": os.getpid(), "log_lines_lost": self._logs.dropped}
        return {"server": own, **self._broker.stats()}

    def _announce(self) -> None:
        host.settle()
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
        self._durable_side.release()
        self._broker.close_all(SHUTDOWN)
        self._desk.close_all()
        timeout_s = self._settings.server.drain_timeout_s
        await asyncio.gather(*(listener.drain(timeout_s) for _, listener in self._listeners))

    async def _reload(self) -> None:
        """SIGHUP: whatever can be read again. What is broken leaves the old in force."""
        self._notifier.reloading()
        try:
            rules = await self._acl.reload(self._program.loaded)
            self._log.info("reloaded", what="policy", rules=rules)
        except ConfigError as error:
            self._log.error("reload failed", what="policy", reason=str(error))
        try:
            await asyncio.to_thread(self._durable_side.reload)
        except ConfigError as error:
            self._log.error("reload failed", what="native port", reason=str(error))
        if self._pirate_side is not None:
            try:
                await self._pirate_side.reload()
            except ConfigError as error:
                self._log.error("reload failed", what="pirate keys", reason=str(error))
        if self._certificates is not None:
            try:
                await asyncio.to_thread(self._certificates.reload)
                self._log.info("reloaded", what="certificates")
            except ConfigError as error:
                self._log.error("reload failed", what="certificates", reason=str(error))
        self._notifier.ready(len(self._listeners))

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._broker.counters.count("faults", UNEXPECTED)
        self._log.error(
            "unexpected error", where=context.get("message"), exc_info=context.get("exception")
        )

    def _on_port_fault(self, error: BaseException) -> None:
        self._broker.counters.count("faults", UNEXPECTED)
        self._log.error("unexpected error", where="native", exc_info=error)

    def _on_tick_error(self, error: Exception) -> None:
        self._broker.counters.count("faults", UNEXPECTED)
        self._log.error("unexpected error", where="timer", exc_info=error)


def _print(text: str) -> None:
    """On stdout, at once. Whoever started us may have closed it: that is no reason to stop."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
