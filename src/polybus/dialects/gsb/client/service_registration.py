"""Registrations of services, repeated on every new connection.

A registration is sent at once, so that later calls on the connection find the service; the
reply is awaited separately. After a reconnect the bus may still have the old connection, which
owns the name. The registration is then refused (409) and retried until the name is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Coroutine
from typing import Any

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.client.gsb_connection import Answer, GsbConnection
from polybus.dialects.gsb.client.service_host import ServiceHost
from polybus.dialects.gsb.codec import StatusCode, error_from_status
from polybus.errors import ConnectionLost, PolybusError

log = logging.getLogger("polybus.gsb")

# The bus notices a dead connection within seconds, at the latest by its pings.
RETRY_S = 0.25


class ServiceRegistrations:
    """The registrations of one client, and their results."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._waiting: dict[str, asyncio.Future[None]] = {}  # by service, until its reply
        self._retried: dict[str, GsbConnection] = {}  # services whose name was taken, by connection
        self._tasks: set[asyncio.Task[None]] = set()

    # --- one service, on an open connection

    def register(self, connection: GsbConnection | None, service_id: str) -> None:
        """Send a registration. Without a connection, `send_all` sends it later."""
        if connection is not None:
            settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[service_id] = settled
            # Sent now, and not by the task: later calls on the connection must come after it.
            answer = connection.send_request(_packet(service_id))
            self._spawn(self._wait_first_reply(connection, service_id, answer))

    async def wait(self, service_id: str) -> None:
        settled = self._waiting.get(service_id)
        if settled is None:
            return
        try:
            await asyncio.shield(settled)
        finally:
            if settled.done() and self._waiting.get(service_id) is settled:
                del self._waiting[service_id]  # its result was delivered

    async def wait_settled(self) -> None:
        """Wait until no reply is pending, whatever the results are."""
        waiting = [settled for settled in self._waiting.values() if not settled.done()]
        if waiting:
            await asyncio.wait(waiting)

    async def wait_for_all(self) -> None:
        for service_id in list(self._waiting):
            await self.wait(service_id)

    async def _wait_first_reply(
        self, connection: GsbConnection, service_id: str, answer: Answer
    ) -> None:
        try:
            self._on_reply(service_id, *await connection.wait_reply(answer))
        except ConnectionLost:
            pass  # send_all sends it again on the next connection
        except PolybusError as error:
            self._settle(service_id, error)

    # --- all services, on a new connection

    def send_all(
        self, connection: GsbConnection, besides: Container[str] = ()
    ) -> dict[str, Answer]:
        wanted = [service_id for service_id in self._host.services if service_id not in besides]
        return {service_id: connection.send_request(_packet(service_id)) for service_id in wanted}

    async def wait_replies(
        self, connection: GsbConnection, answers: dict[str, Answer], again: bool
    ) -> None:
        """Wait for the replies. After a reconnect (`again`) a refusal is logged, not raised."""
        for service_id, answer in answers.items():
            code, message = await answer
            if again and code == StatusCode.CONFLICT:
                self._retried[service_id] = connection
                self._spawn(self._retry_conflict(connection, service_id))
                continue
            error = self._on_reply(service_id, code, message)
            if error is not None and not again:
                raise error

    async def _retry_conflict(self, connection: GsbConnection, service_id: str) -> None:
        log.warning("%s is still registered by another connection; retrying", service_id)
        code, message = int(StatusCode.CONFLICT), ""
        while code == StatusCode.CONFLICT:
            await asyncio.sleep(RETRY_S)
            if not connection.is_up or self._retried.get(service_id) is not connection:
                return
            try:
                code, message = await connection.ask(_packet(service_id))
            except PolybusError:
                return  # the next connection registers it
        self._retried.pop(service_id, None)
        self._on_reply(service_id, code, message)

    def stop_retrying(self, service_id: str) -> bool:
        """Stop retrying a taken name. Returns False if it was not being retried."""
        return self._retried.pop(service_id, None) is not None

    # --- results

    def fail(self, error: PolybusError) -> None:
        """End all waiting registrations with an error: the client has no more connections."""
        for service_id in list(self._waiting):
            self._settle(service_id, error)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _on_reply(self, service_id: str, code: int, message: str) -> PolybusError | None:
        error = error_from_status(code, message, f"register {service_id!r}") if code else None
        self._settle(service_id, error)
        return error

    def _settle(self, service_id: str, error: PolybusError | None) -> None:
        if error is not None:
            self._host.remove(service_id)
            log.error("%s", error)
        settled = self._waiting.get(service_id)
        if settled is None or settled.done():
            return
        if error is None:
            settled.set_result(None)
            self._waiting.pop(service_id, None)
        else:
            settled.set_exception(error)
            settled.exception()  # marks it as retrieved: it was logged

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _packet(service_id: str) -> pb.Packet:
    return pb.Packet(register_request=pb.RegisterRequest(service_id=service_id))
