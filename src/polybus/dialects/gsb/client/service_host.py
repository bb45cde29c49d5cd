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
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

import msgpack

from polybus.dialects.gsb import codec
from polybus.dialects.gsb.client.handler_threads import HandlerThreads
from polybus.dialects.gsb.service_address import resolve_service
from polybus.errors import ConnectionLost, PolybusError, ServiceFailed, TooLarge

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.dialects.gsb.client.gsb_connection import GsbConnection, Packet

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


class HandlerRunner:
    """Runs handlers: one task runs them one after another until one has to wait.

    Most handlers reply without waiting. A task for each would cost more than the handler
    itself, so one task works through the queue. When a handler waits, the task stays with it
    (so it can be cancelled and may use timeouts), and a new task continues with the queue.
    """

    def __init__(self) -> None:
        self._queue: deque[_ServedCall] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, call: _ServedCall) -> None:
        self._queue.append(call)

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
            call = self._queue.popleft()
            if not call.cancelled:
                await self._drive(call, call.answer(), me)
        if self._worker is me:
            self._worker = None

    @types.coroutine
    def _drive(
        self, call: _ServedCall, work: Coroutine[Any, Any, None], task: asyncio.Task[None]
    ) -> Generator[Any, Any, None]:
        """Run a handler as `await work` would. If its first step does not end it, detach it."""
        try:
            awaited = work.send(None)
        except StopIteration:
            return
        self._worker = None
        call.task = task
        self.start()
        resume: Callable[[Any], Any]
        while True:
            value: Any
            try:
                value = yield awaited
            except BaseException as error:
                resume, value = work.throw, error
            else:
                resume = work.send
            try:
                awaited = resume(value)
            except StopIteration:
                return

    async def stop(self) -> None:
        """Cancel all running handlers and wait for them to end."""
        self._queue.clear()
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class ServiceHost:
    """All services of one client. Calls come from `connection`."""

    def __init__(self, max_calls: int, threads: int) -> None:
        self.services: dict[str, HostedService] = {}
        self.connection: GsbConnection | None = None
        self.pack = msgpack.Packer().pack
        self.threads = HandlerThreads(threads)
        self._max_calls = max_calls
        self._open: dict[bytes, _ServedCall] = {}
        self._known: dict[str, HostedService | None] = {}
        self._runner = HandlerRunner()
        self.run_queued = self._runner.start

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

    # --- called by the connection (`run_queued` follows the last request of a read)

    def on_request(self, request: Packet) -> None:
        _, request_id, data, caller, address = request
        service = self._known.get(address)
        if service is None:
            service = resolve_service(self.services, address)
            if len(self._known) >= MAX_KNOWN_ADDRESSES:
                self._known.clear()
            self._known[address] = service
        if service is None:
            self.fail(request_id, 404, f"{address} is not served here")
        elif len(self._open) >= self._max_calls:
            self.fail(request_id, 503, "the service is busy (max_calls)")
        else:
            call = _ServedCall(self, service, request_id, data, caller, address)
            self._open[request_id] = call
            self._runner.add(call)

    def credit(self, request_id: bytes, replies: int) -> None:
        call = self._open.get(request_id)
        if call is not None:
            call.grant(replies)

    def cancel(self, request_id: bytes) -> None:
        call = self._open.pop(request_id, None)
        if call is not None:
            call.cancel()

    def cancel_all(self) -> None:
        """Cancel all calls: the connection is lost, and with it their callers."""
        self.connection = None
        for request_id in list(self._open):
            self.cancel(request_id)

    async def stop(self) -> None:
        self.cancel_all()
        await self._runner.stop()
        self.threads.stop()

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


class _ServedCall:
    """One call, until it is answered or cancelled."""

    __slots__ = (
        "_address",
        "_caller",
        "_credit",
        "_data",
        "_free",
        "_free_bytes",
        "_granted",
        "_host",
        "_request_id",
        "_service",
        "cancelled",
        "task",
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
        self._request_id = request_id
        self._data = data
        self._caller = caller
        self._address = address
        self._free, self._free_bytes, self._credit = codec.FREE_PARTIALS, codec.FREE_BYTES, 0
        self._granted: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None  # set once the handler has waited
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    def grant(self, replies: int) -> None:
        self._credit += replies
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    async def answer(self) -> None:
        """Run the handler and send its replies. Raises only if the call was cancelled."""
        try:
            await self._handle()
        except asyncio.CancelledError:
            if self.cancelled:
                raise
            # The handler cancelled itself, and its caller waits for a reply. The task must not
            # end here: other calls may be queued for it.
            self._on_failure(ServiceFailed("the handler was cancelled", 500))
        except ConnectionLost:
            self._host.finish_call(self._request_id)
        except Exception as error:
            self._on_failure(error)

    async def _handle(self) -> None:
        service, host = self._service, self._host
        try:
            value = codec.unpack(self._data)  # type: ignore[arg-type]
        except ValueError as error:
            raise ServiceFailed(f"the data must be msgpack: {error}", 400) from None
        call = Call(value, self._caller, self._address, service.id)
        if service.streams:
            return await self._stream(service.handler(call))
        if service.is_async:
            answer = service.handler(call)
        else:
            answer = host.threads.run(service.handler, call)
        result = await answer if isinstance(answer, Awaitable) else answer
        if inspect.isasyncgen(result):
            return await self._stream(result)
        if inspect.isgenerator(result):
            return await self._stream(host.threads.iterate(result))
        data = b"" if result is None else host.pack(result)
        connection = host.connection
        # Only large replies wait for room in the outbox.
        if len(data) > 0xFFFF and connection is not None and connection.is_full:
            await connection.wait_room()
        if not self.cancelled:
            # Sent before the call is closed: TooLarge becomes the failure of an open call.
            host.reply(self._request_id, OK, False, data)
            host.finish_call(self._request_id)
        return None

    async def _stream(self, items: Any) -> None:
        host, request_id, pack = self._host, self._request_id, self._host.pack
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
                connection = host.connection
                if connection is None or self.cancelled:
                    return
                if connection.is_full:
                    await connection.wait_room()
                connection.reply(request_id, OK, True, data)
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

    def _on_failure(self, error: Exception) -> None:
        if not isinstance(error, PolybusError):
            log.warning("service %s failed", self._service.id, exc_info=error)
        if not self._host.finish_call(self._request_id):
            return
        if isinstance(error, ServiceFailed):
            status, text = error.status, str(error)
        else:
            status, name = FAILURE, type(error).__name__
            text = f"{name}: {error}" if str(error) else name
        try:
            self._host.fail(self._request_id, status, text)
        except (ConnectionLost, TooLarge):
            log.warning("service %s: cannot send the failure to the caller", self._service.id)
