"""The service's side: runs handlers for calls and sends their replies.

A handler is a function of one `Call`. Its return value is the reply; if it yields, each item is
one of a stream. `async def` runs on the loop, a plain `def` in a thread. An exception becomes a
failure of the service with the exception's text; `ServiceFailed` also sets the number.

A stream is as fast as its caller reads: the bus grants credit, and a handler without credit
waits inside its `yield`. A call that is cancelled (by its caller, its deadline or a lost
connection) cancels its handler, which is closed like any generator or task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from polybus.dialects.gsb import codec
from polybus.dialects.gsb.client.handler_threads import HandlerThreads
from polybus.dialects.gsb.codec import failure_payload
from polybus.dialects.gsb.service_address import resolve_service
from polybus.errors import ConnectionLost, PolybusError, ServiceFailed, TooLarge

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.dialects.gsb.client.gsb_connection import GsbConnection, Packet


Work = Coroutine[Any, Any, None]


class HandlerJob(Protocol):
    """A handler to run. `work` returns its coroutine, or None if it was cancelled.

    `on_wait` gets the task of the job once the job has a task of its own.
    """

    def work(self) -> Work | None: ...
    def on_wait(self, task: asyncio.Task[None]) -> None: ...


class HandlerRunner:
    """Runs jobs: one task runs them one after another until one has to wait.

    Most handlers reply without waiting. A task for each would cost more than the handler
    itself, so one task works through the queue. When a handler waits, the task stays with it
    (so it can be cancelled and may use timeouts), and a new task continues with the queue.

    A job must not raise.
    """

    def __init__(self) -> None:
        self._queue: deque[HandlerJob] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, job: HandlerJob) -> None:
        self._queue.append(job)

    def start(self) -> None:
        """Start a task for the queue, if none runs."""
        if self._worker is None and self._queue:
            self._worker = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(self._worker)
            self._worker.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        me = self._worker
        assert me is not None
        while self._queue and self._worker is me:
            job = self._queue.popleft()
            work = job.work()
            if work is not None:
                await _CoroutineSteps(work, lambda job=job: self._detach_worker(me, job))  # type: ignore[misc]
        if self._worker is me:
            self._worker = None

    def _detach_worker(self, task: asyncio.Task[None], job: HandlerJob) -> None:
        self._worker = None
        job.on_wait(task)
        self.start()

    async def stop(self) -> None:
        """Cancel all running jobs and wait for them to end."""
        self._queue.clear()
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class _CoroutineSteps:
    """Awaits a coroutine, and calls `on_wait` if its first step does not end it."""

    __slots__ = ("_on_wait", "_work")

    def __init__(self, work: Work, on_wait: Callable[[], None]) -> None:
        self._work = work
        self._on_wait = on_wait

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            awaited = self._work.send(None)
        except StopIteration:
            return
        self._on_wait()
        yield from _rest(self._work, awaited)


def _rest(work: Work, awaited: Any) -> Generator[Any, Any, None]:
    """Drive the coroutine from its second step, as a task would."""
    while True:
        try:
            sent = yield awaited
        except BaseException as error:
            step: Callable[[], Any] = lambda error=error: work.throw(error)  # type: ignore[misc]  # noqa: E731
        else:
            step = lambda sent=sent: work.send(sent)  # type: ignore[misc]  # noqa: E731
        try:
            awaited = step()
        except StopIteration:
            return


log = logging.getLogger("polybus.gsb")

Handler = Callable[["Call"], Any]

OK, FAILURE = int(codec.StatusCode.OK), int(codec.StatusCode.FAILURE)
# Cached addresses of a client. A service may have any number of methods.
MAX_KNOWN_ADDRESSES = 4096
# A stream yields to other tasks after this many items, even if it has credit.
TURN_ITEMS = 256


class Call:
    """The argument of a handler. `method` is the part of the address after the service id."""

    __slots__ = ("address", "caller", "data", "service_id")

    def __init__(self, data: Any, caller: str, address: str, service_id: str) -> None:
        self.data = data
        self.caller = caller
        self.address = address
        self.service_id = service_id

    @property
    def method(self) -> str:
        return self.address[len(self.service_id) + 1 :]

    def __repr__(self) -> str:
        return f"Call(address={self.address!r}, caller={self.caller!r}, data={self.data!r})"


class HostedService:
    """A handler, and how to run it."""

    def __init__(self, service_id: str, handler: Handler) -> None:
        self.id = service_id
        self.handler = handler
        function = handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004
        self.streams = inspect.isasyncgenfunction(function)
        self.is_async = self.streams or inspect.iscoroutinefunction(function)


class ServiceHost:
    """All services of one client. Calls come from `connection`."""

    def __init__(self, max_calls: int, threads: int) -> None:
        self.services: dict[str, HostedService] = {}
        self.connection: GsbConnection | None = None
        self._max_calls = max_calls
        self._open: dict[bytes, _ServedCall] = {}
        self._known: dict[str, HostedService | None] = {}
        self._runner = HandlerRunner()
        self._threads = HandlerThreads(threads)
        self.pack = msgpack.Packer().pack

    def __len__(self) -> int:
        return len(self.services)

    @property
    def open_calls(self) -> int:
        return len(self._open)

    def add(self, service: HostedService) -> None:
        self.services[service.id] = service
        self._known.clear()

    def remove(self, service_id: str) -> None:
        self.services.pop(service_id, None)
        self._known.clear()

    # --- called by the connection

    def on_request(self, request: Packet) -> None:
        _, request_id, data, caller, address = request
        service = self._known.get(address) or self._find(address)
        if service is None:
            return self.fail(request_id, 404, f"{address} is not served here")
        if len(self._open) >= self._max_calls:
            return self.fail(request_id, 503, "the service is busy (max_calls)")
        job = _ServedCall(self, service, request_id, data, caller, address)
        self._open[request_id] = job
        return self._runner.add(job)

    def run_queued(self) -> None:
        self._runner.start()

    def credit(self, request_id: bytes, replies: int) -> None:
        job = self._open.get(request_id)
        if job is not None:
            job.grant(replies)

    def cancel(self, request_id: bytes) -> None:
        job = self._open.pop(request_id, None)
        if job is not None:
            job.cancel()

    def cancel_all(self) -> None:
        """Cancel all calls: the connection is lost, and with it their callers."""
        self.connection = None
        for request_id in list(self._open):
            self.cancel(request_id)

    async def stop(self) -> None:
        self.cancel_all()
        await self._runner.stop()
        self._threads.stop()

    # --- called by served calls

    def reply(self, request_id: bytes, code: int, partial: bool, data: bytes) -> None:
        if self.connection is not None:
            self.connection.reply(request_id, code, partial, data)

    def finish_call(self, request_id: bytes) -> bool:
        """Close a call. Returns False if it was already closed."""
        return self._open.pop(request_id, None) is not None

    def fail(self, request_id: bytes, status: int, message: str) -> None:
        data = codec.pack_failure(status, message, codec.Origin.SERVICE)
        self.reply(request_id, FAILURE, False, data)

    async def run_in_thread(self, service: HostedService, call: Call) -> Any:
        return await self._threads.run(service.handler, call)

    def iterate(self, items: Any) -> AsyncIterator[Any]:
        return self._threads.iterate(items)

    def _find(self, address: str) -> HostedService | None:
        """Resolve an address and cache the result."""
        service = resolve_service(self.services, address)
        if len(self._known) >= MAX_KNOWN_ADDRESSES:
            self._known.clear()
        self._known[address] = service
        return service


class _ServedCall:
    """One call, until it is answered or cancelled."""

    __slots__ = (
        "_credit",
        "_data",
        "_free",
        "_free_bytes",
        "_granted",
        "_host",
        "_service",
        "_task",
        "address",
        "caller",
        "cancelled",
        "request_id",
    )

    def __init__(
        self,
        host: ServiceHost,
        service: HostedService,
        request_id: bytes,
        data: Buffer,
        caller: str,
        address: str,
    ) -> None:
        self._host = host
        self._service = service
        self._data = data
        self._task: asyncio.Task[None] | None = None
        self._free, self._free_bytes, self._credit = codec.FREE_PARTIALS, codec.FREE_BYTES, 0
        self._granted: asyncio.Future[None] | None = None
        self.request_id = request_id
        self.caller = caller
        self.address = address
        self.cancelled = False

    # --- called by the runner

    def work(self) -> Any:
        return None if self.cancelled else self._answer()

    def on_wait(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def cancel(self) -> None:
        self.cancelled = True
        if self._task is not None:
            self._task.cancel()

    def grant(self, replies: int) -> None:
        self._credit += replies
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    # --- the work

    async def _answer(self) -> None:
        try:
            await self._handle()
        except asyncio.CancelledError:
            if self.cancelled:
                raise
            # The handler cancelled itself, and its caller waits for a reply. The task must not
            # end here: other jobs may be queued for it.
            self._on_failure(ServiceFailed("the handler was cancelled", 500))
        except ConnectionLost:
            self._host.finish_call(self.request_id)
        except Exception as error:
            self._on_failure(error)

    async def _handle(self) -> None:
        service, host = self._service, self._host
        call = Call(self._value(), self.caller, self.address, service.id)
        if service.streams:
            return await self._stream(service.handler(call))
        answer = service.handler(call) if service.is_async else host.run_in_thread(service, call)
        result = await answer if isinstance(answer, Awaitable) else answer
        if inspect.isasyncgen(result):
            return await self._stream(result)
        if inspect.isgenerator(result):
            return await self._stream(host.iterate(result))
        data = b"" if result is None else host.pack(result)
        if len(data) > 0xFFFF:  # large replies wait for room in the outbox
            await self._wait_room()
        if not self.cancelled:
            host.reply(
                self.request_id, OK, False, data
            )  # raises TooLarge while the call is still open
            host.finish_call(self.request_id)
        return None

    def _value(self) -> Any:
        try:
            return codec.unpack(self._data)  # type: ignore[arg-type]
        except ValueError as error:
            raise ServiceFailed(f"the data must be msgpack: {error}", 400) from None

    async def _stream(self, items: Any) -> None:
        host, request_id, pack = self._host, self.request_id, self._host.pack
        in_a_row = 0
        try:
            async for item in items:
                data = b"" if item is None else pack(item)
                if self._free > 0 and self._free_bytes > 0:
                    self._free -= 1
                    self._free_bytes -= len(data)
                elif self._credit > 0:
                    self._credit -= 1
                else:
                    in_a_row = 0
                    await self._wait_for_credit()
                link = host.connection
                if link is None or self.cancelled:
                    return
                if link.is_full:
                    await link.wait_room()
                link.reply(request_id, OK, True, data)
                in_a_row += 1
                if in_a_row >= TURN_ITEMS:
                    in_a_row = 0
                    await asyncio.sleep(0)
        finally:
            await items.aclose()
        if host.finish_call(request_id):
            host.reply(request_id, OK, False, b"")

    async def _wait_for_credit(self) -> None:
        while not self._credit:
            self._granted = asyncio.get_running_loop().create_future()
            try:
                await self._granted
            finally:
                self._granted = None
        self._credit -= 1

    async def _wait_room(self) -> None:
        link = self._host.connection
        if link is not None and link.is_full:
            await link.wait_room()

    def _on_failure(self, error: Exception) -> None:
        if not isinstance(error, PolybusError):
            log.warning("service %s failed", self._service.id, exc_info=error)
        if not self._host.finish_call(self.request_id):
            return
        try:
            self._host.reply(self.request_id, FAILURE, False, failure_payload(error))
        except (ConnectionLost, TooLarge):
            log.warning("service %s: cannot send the failure to the caller", self._service.id)
