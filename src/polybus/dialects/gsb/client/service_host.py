"""The service's side: calls of others, handlers of this program, replies.

A handler is a function of one `Call`. What it returns is the answer; if it yields,
each item is one of a stream. `async def` runs on the loop; a plain `def` runs in a
thread. What it raises is told to the caller as a failure of the service, with the
error's text; `ServiceFailed` chooses the number as well.

A stream goes as fast as its caller reads: the bus grants credit, and a handler that
has none left waits inside its `yield`. A call that was cancelled (by its caller, its
deadline, or a lost connection) cancels its handler, which is closed like any
generator or task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgpack

from polybus.dialects.gsb import codec
from polybus.dialects.gsb.call_errors import failure_payload
from polybus.dialects.gsb.client.handler_runner import HandlerRunner
from polybus.dialects.gsb.client.handler_threads import HandlerThreads
from polybus.errors import ConnectionLost, PolybusError, ServiceFailed, TooLarge

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.dialects.gsb.client.gsb_connection import GsbConnection
    from polybus.dialects.gsb.client.packet_reader import Packet

log = logging.getLogger("polybus.gsb")

Handler = Callable[["Call"], Any]

OK, FAILURE = int(codec.StatusCode.OK), int(codec.StatusCode.FAILURE)
# Known addresses of one client; a service with endless methods must not fill the memory.
MAX_KNOWN_ADDRESSES = 4096
# A stream gives way to others after so many items, even if it has credit for more.
TURN_ITEMS = 256


class Call:
    """What a handler gets. `method` is what the address has behind the service's id."""

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
    """A handler, and how it is to be run."""

    def __init__(self, service_id: str, handler: Handler) -> None:
        self.id = service_id
        self.handler = handler
        asked = handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004
        self.streams = inspect.isasyncgenfunction(asked)
        self.is_async = self.streams or inspect.iscoroutinefunction(asked)


class ServiceHost:
    """All services of one client. `link` is the connection that calls come from."""

    def __init__(self, max_calls: int, threads: int) -> None:
        self.services: dict[str, HostedService] = {}
        self.link: GsbConnection | None = None
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

    # --- what the link does with it

    def on_request(self, request: Packet) -> None:
        _, request_id, data, caller, address = request
        service = self._known.get(address) or self._find(address)
        if service is None:
            return self.fail(request_id, 404, f"{address} is not served here any more")
        if len(self._open) >= self._max_calls:
            return self.fail(request_id, 503, "the service is busy: it has max_calls calls")
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
        """The connection is gone, and with it everybody who waits for an answer."""
        self.link = None
        for request_id in list(self._open):
            self.cancel(request_id)

    async def stop(self) -> None:
        self.cancel_all()
        await self._runner.stop()
        self._threads.stop()

    # --- what answers do with it

    def reply(self, request_id: bytes, code: int, partial: bool, data: bytes) -> None:
        if self.link is not None:
            self.link.reply(request_id, code, partial, data)

    def finish_call(self, request_id: bytes) -> bool:
        """Is the call still open? It is not from now on."""
        return self._open.pop(request_id, None) is not None

    def fail(self, request_id: bytes, status: int, message: str) -> None:
        said = codec.pack_failure(status, message, codec.Origin.SERVICE)
        self.reply(request_id, FAILURE, False, said)

    async def run_in_thread(self, service: HostedService, call: Call) -> Any:
        return await self._threads.run(service.handler, call)

    def iterate(self, items: Any) -> AsyncIterator[Any]:
        return self._threads.iterate(items)

    def _find(self, address: str) -> HostedService | None:
        """The longest id that the address begins with, at a slash."""
        name = address
        while name and name not in self.services:
            name = name.rpartition("/")[0]
        found = self.services.get(name)
        if len(self._known) >= MAX_KNOWN_ADDRESSES:
            self._known.clear()
        self._known[address] = found
        return found


class _ServedCall:
    """One call, until it is answered or cancelled."""

    __slots__ = (
        "_credit",
        "_data",
        "_free",
        "_free_bytes",
        "_granted",
        "_service",
        "_serving",
        "_task",
        "address",
        "caller",
        "cancelled",
        "request_id",
    )

    def __init__(
        self,
        serving: ServiceHost,
        service: HostedService,
        request_id: bytes,
        data: Buffer,
        caller: str,
        address: str,
    ) -> None:
        self._serving = serving
        self._service = service
        self._data = data
        self._task: asyncio.Task[None] | None = None
        self._free, self._free_bytes, self._credit = codec.FREE_PARTIALS, codec.FREE_BYTES, 0
        self._granted: asyncio.Future[None] | None = None
        self.request_id = request_id
        self.caller = caller
        self.address = address
        self.cancelled = False

    # --- for the runner

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
            # It cancelled itself, and somebody waits for an answer. Others may wait behind it
            # for the same task: theirs is not cancelled.
            self._on_failure(ServiceFailed("the handler was cancelled", 500))
        except ConnectionLost:
            self._serving.finish_call(self.request_id)
        except Exception as error:
            self._on_failure(error)

    async def _handle(self) -> None:
        service, serving = self._service, self._serving
        call = Call(self._value(), self.caller, self.address, service.id)
        if service.streams:
            return await self._stream(service.handler(call))
        answer = service.handler(call) if service.is_async else serving.run_in_thread(service, call)
        result = await answer if isinstance(answer, Awaitable) else answer
        if inspect.isasyncgen(result):
            return await self._stream(result)
        if inspect.isgenerator(result):
            return await self._stream(serving.iterate(result))
        data = b"" if result is None else serving.pack(result)
        if len(data) > 0xFFFF:  # it may be too large to be sent, and then it is a failure
            await self._wait_room()
        if not self.cancelled:
            serving.reply(self.request_id, OK, False, data)  # too large? then it has not ended
            serving.finish_call(self.request_id)
        return None

    def _value(self) -> Any:
        try:
            return codec.unpack(self._data)  # type: ignore[arg-type]
        except ValueError as error:
            raise ServiceFailed(f"the data is not msgpack: {error}", 400) from None

    async def _stream(self, items: Any) -> None:
        serving, request_id, pack = self._serving, self.request_id, self._serving.pack
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
                link = serving.link
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
        if serving.finish_call(request_id):
            serving.reply(request_id, OK, False, b"")

    async def _wait_for_credit(self) -> None:
        while not self._credit:
            self._granted = asyncio.get_running_loop().create_future()
            try:
                await self._granted
            finally:
                self._granted = None
        self._credit -= 1

    async def _wait_room(self) -> None:
        link = self._serving.link
        if link is not None and link.is_full:
            await link.wait_room()

    def _on_failure(self, error: Exception) -> None:
        if not isinstance(error, PolybusError):
            log.warning("service %s failed", self._service.id, exc_info=error)
        if not self._serving.finish_call(self.request_id):
            return
        try:
            self._serving.reply(self.request_id, FAILURE, False, failure_payload(error))
        except (ConnectionLost, TooLarge):
            log.warning("service %s could not tell its failure", self._service.id)
