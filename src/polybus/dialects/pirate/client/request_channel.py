"""The Lazy Pirate pattern: send, wait, and send again on a new socket.

A channel carries one request at a time. Each is sent with a number before the empty frame, and
only the reply with that number is its answer; any other is late and dropped. If there is no
answer within the timeout and no bytes move, the socket is closed and the next try opens another.

A message of 64 MiB takes a slow link longer than the timeout. ZeroMQ reports it only when it is
complete, but the kernel counts the bytes of the connection, so a try is extended while they move.

ZeroMQ itself waits silently for a bus that refuses it. So each socket is monitored: an unknown
key, or CURVE on one side only, fails the request at once, and an unreachable bus is
distinguished from one that does not answer.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from polybus.dialects.pirate import client_id, codec
from polybus.dialects.pirate.client.client_keys import ClientKeys
from polybus.dialects.pirate.client.pirate_options import ClientOptions
from polybus.errors import (
    AddressError,
    ConfigError,
    Denied,
    NotConnected,
    PolybusError,
    Unavailable,
)
from polybus.model import tcp_info

MIN_PROGRESS_BYTES: Final = 16 << 10  # per check; less is not a large message in transfer


class TransferMark(NamedTuple):
    """Bytes received and sent by the connection with this descriptor."""

    fd: int
    moved: int


def read_mark(fd: int) -> TransferMark:
    """Return the bytes of a TCP connection; 0 for any other or a closed one."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.TCP_INFO_BYTES)
    except OSError:
        return TransferMark(fd, 0)
    return TransferMark(fd, sum(tcp_info.read_byte_counts(info)))


def has_moved(before: TransferMark, now: TransferMark) -> bool:
    """Return True if enough bytes moved. A new connection counts from 0."""
    return now.moved - (before.moved if before.fd == now.fd else 0) >= MIN_PROGRESS_BYTES


WATCHED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
UNKNOWN_KEY: Final = 400  # the ZAP status of the bus for it
OTHER_MECHANISM: Final = 0x11000002  # libzmq: one side has CURVE, the other not
MAX_SOCKETS: Final = 16384  # per process; a channel has three
NO_CONNECTION: Final = -1
PROGRESS_CHECKS: Final = 4  # checks per timeout whether bytes move; if so, the timeout starts again
# The timeout allows for this rate, so that a slow link need not send a large message twice.
SLOWEST_BYTES_PER_S: Final = 4 << 20

_shared: tuple[int, zmq.asyncio.Context] | None = None


def _context() -> zmq.asyncio.Context:
    """Return the context of the process. A forked child gets its own."""
    global _shared
    if _shared is None or _shared[0] != os.getpid():
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _shared = os.getpid(), context
    return _shared[1]


class RequestChannel:
    """A channel to the bus for one request at a time. The caller must hold a lock."""

    def __init__(self, server: str, options: ClientOptions, keys: ClientKeys | None) -> None:
        self._server = server
        self._options = options
        self._keys = keys
        self._numbers = count(1)
        self._socket: _DealerSocket | None = None

    async def ask(self, frames: Sequence[bytes], size: int = 0) -> list[bytes]:
        """Return the frames of the reply. Raises an error with the reason if there is none."""
        timeout_s = self._options.timeout_s + size / SLOWEST_BYTES_PER_S
        reason = ""
        for attempt in range(self._options.tries):
            if attempt:
                await asyncio.sleep(random.uniform(0, self._options.jitter_s) * attempt)
            if self._socket is None:
                self._socket = _DealerSocket(self._server, self._keys)
            try:
                reply = await self._socket.ask(codec.u64(next(self._numbers)), frames, timeout_s)
            except BaseException:
                self.close()
                raise
            if reply is not None:
                return reply
            reason = self._socket.failure_reason
            self.close()
        tried = f"{self._options.tries} tries of {self._options.timeout_s:g} s"
        raise NotConnected(f"{reason} ({tried})")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _DealerSocket:
    """One socket, and the task that reads its monitor."""

    def __init__(self, server: str, keys: ClientKeys | None) -> None:
        self.failure_reason = f"no bus answers at {server}; is it running ('polybus serve')?"
        self._fd = NO_CONNECTION
        self._server = server
        self._keys = keys
        self._rejection: asyncio.Future[PolybusError] = asyncio.get_running_loop().create_future()
        try:
            self._socket = _context().socket(zmq.DEALER)
            self._monitor = self._socket.get_monitor_socket(WATCHED)
        except zmq.ZMQError as error:
            raise Unavailable(f"cannot open a socket: {error.strerror}") from None
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES + codec.SEALED_BYTES)
        try:
            if keys is not None:
                self._socket.curve_publickey = keys.public
                self._socket.curve_secretkey = keys.secret
                self._socket.curve_serverkey = keys.server
            try:
                self._socket.connect(server)
            except zmq.ZMQError as error:
                raise AddressError(f"{server}: {error.strerror}") from None
        except BaseException:
            self._close_sockets()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def ask(
        self, number: bytes, frames: Sequence[bytes], timeout_s: float
    ) -> list[bytes] | None:
        """Return the reply with this number, or None if none arrives in time."""
        loop = asyncio.get_running_loop()
        mark, end = read_mark(self._fd), loop.time() + timeout_s
        # libzmq gives up a bus that refuses it; a send would then wait forever.
        sending = asyncio.ensure_future(self._socket.send_multipart([number, b"", *frames]))
        if not await self._wait_done(timeout_s, sending):
            return None
        while (left := end - loop.time()) > 0:
            reply = await self._reply(number, min(left, timeout_s / PROGRESS_CHECKS))
            if reply is not None:
                return reply
            before, mark = mark, read_mark(self._fd)
            if has_moved(before, mark):
                end = loop.time() + timeout_s
        return None

    async def _reply(self, number: bytes, timeout_s: float) -> list[bytes] | None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while (left := end - loop.time()) > 0:
            receiving = asyncio.ensure_future(self._socket.recv_multipart())
            if not await self._wait_done(left, receiving):
                break
            reply = receiving.result()
            if reply[:2] == [number, b""]:
                return reply[2:]
        return None

    def close(self) -> None:
        self._watching.cancel()
        self._close_sockets()

    async def _wait_done(self, timeout_s: float, doing: asyncio.Future[Any]) -> bool:
        """Return True if it is done in time. Raises the reason if the bus refuses this client."""
        try:
            await asyncio.wait(
                (doing, self._rejection),
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if doing.cancelled():
                raise NotConnected("the client is closed")
            if doing.done():
                doing.result()  # raises its error
                return True
        finally:
            doing.cancel()
        if self._rejection.done():
            raise self._rejection.result()
        return False

    async def _watch(self) -> None:
        while not self._rejection.done():
            event = parse_monitor_message(await self._monitor.recv_multipart())
            self._on_monitor_event(event["event"], event["value"])

    def _on_monitor_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._fd = value
            self.failure_reason = (
                f"the server at {self._server} does not speak ZeroMQ or does not respond"
            )
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.failure_reason = f"the bus at {self._server} does not answer"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == UNKNOWN_KEY:
            client = "this client"
            if self._keys is not None:
                client = f"client {client_id.format_client_id(self._keys.client_id)}"
            text = (
                f"the bus at {self._server} does not know the key of {client};"
                " allow it there with 'polybus keys allow'"
            )
            self._rejection.set_result(Denied(text))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == OTHER_MECHANISM:
            rejection: PolybusError = ConfigError(
                f"{self._server} does not speak CURVE; omit --curve or curve="
            )
            if self._keys is None:
                rejection = Denied(f"{self._server} requires a CURVE key; use --curve or curve=")
            self._rejection.set_result(rejection)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._keys is not None:
            self.failure_reason = (
                f"the bus at {self._server} closes the connection; is server.key its public key?"
            )

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
