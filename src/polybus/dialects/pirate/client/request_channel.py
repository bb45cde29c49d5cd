"""The Lazy Pirate: ask, wait a while, and ask again on a new socket.

A lane carries one request at a time. Each is sent with a number before the empty frame, and
only the reply with that number is its answer: whatever else comes is late, and dropped. No
answer within the time, and nothing of one (progress.py): the socket is closed, and the next
try opens another.

ZeroMQ itself would wait in silence for a bus that shuts it out. So each socket is watched:
a key that the bus does not know, or CURVE on one side only, ends the request at once; a bus
that was never reached is told from one that does not answer.
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

MIN_PROGRESS_BYTES: Final = 16 << 10  # between two looks: less is no large message on its way


class TransferMark(NamedTuple):
    """What has come and gone by the connection that has this descriptor."""

    fd: int
    moved: int


def read_mark(fd: int) -> TransferMark:
    """Nothing moves by what is no TCP connection, or has ended."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.TCP_INFO_BYTES)
    except OSError:
        return TransferMark(fd, 0)
    return TransferMark(fd, sum(tcp_info.read_byte_counts(info)))


def has_moved(before: TransferMark, now: TransferMark) -> bool:
    """Another connection has begun with nothing."""
    return now.moved - (before.moved if before.fd == now.fd else 0) >= MIN_PROGRESS_BYTES


WATCHED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
UNKNOWN_KEY: Final = 400  # what the bus's ZAP says of it
OTHER_MECHANISM: Final = 0x11000002  # of libzmq: one side has CURVE, the other not
MAX_SOCKETS: Final = 16384  # in one process, three for each lane
NO_CONNECTION: Final = -1
PROGRESS_CHECKS: Final = 4  # in the time of one try, whether something moves: then it begins again
# A slow link shall not have to carry a large message again because it takes its time.
SLOWEST_BYTES_PER_S: Final = 4 << 20

_shared: tuple[int, zmq.asyncio.Context] | None = None


def _context() -> zmq.asyncio.Context:
    """One for the process; a child of a fork gets its own."""
    global _shared
    if _shared is None or _shared[0] != os.getpid():
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _shared = os.getpid(), context
    return _shared[1]


class RequestChannel:
    """One way to the bus. One request at a time: the caller holds a lock."""

    def __init__(self, server: str, options: ClientOptions, keys: ClientKeys | None) -> None:
        self._server = server
        self._options = options
        self._keys = keys
        self._numbers = count(1)
        self._wire: _DealerSocket | None = None

    async def ask(self, frames: Sequence[bytes], size: int = 0) -> list[bytes]:
        """The reply's frames; an error that says why there is none."""
        timeout_s = self._options.timeout_s + size / SLOWEST_BYTES_PER_S
        story = ""
        for attempt in range(self._options.tries):
            if attempt:
                await asyncio.sleep(random.uniform(0, self._options.jitter_s) * attempt)
            if self._wire is None:
                self._wire = _DealerSocket(self._server, self._keys)
            try:
                reply = await self._wire.ask(codec.u64(next(self._numbers)), frames, timeout_s)
            except BaseException:
                self.close()
                raise
            if reply is not None:
                return reply
            story = self._wire.failure_reason
            self.close()
        tried = f"{self._options.tries} tries of {self._options.timeout_s:g} s"
        raise NotConnected(f"{story} ({tried})")

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class _DealerSocket:
    """One socket, and the task that watches it."""

    def __init__(self, server: str, keys: ClientKeys | None) -> None:
        self.failure_reason = f"no bus answers at {server}: is it running ('polybus serve')?"
        self._fd = NO_CONNECTION
        self._server = server
        self._keys = keys
        self._rejection: asyncio.Future[PolybusError] = asyncio.get_running_loop().create_future()
        try:
            self._socket = _context().socket(zmq.DEALER)
            self._monitor = self._socket.get_monitor_socket(WATCHED)
        except zmq.ZMQError as error:
            raise Unavailable(f"no socket for a client: {error.strerror}") from None
        try:
            self._connect()
        except BaseException:
            self._close_sockets()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def ask(
        self, number: bytes, frames: Sequence[bytes], timeout_s: float
    ) -> list[bytes] | None:
        """The answer to this number; None if there was none in time, and none is on its way."""
        loop = asyncio.get_running_loop()
        mark, end = read_mark(self._fd), loop.time() + timeout_s
        # libzmq gives up a bus that shuts it out, and then has nowhere to send to.
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

    # --- inside

    def _connect(self) -> None:
        socket = self._socket
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES + codec.SEALED_BYTES)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self._keys
        try:
            socket.connect(self._server)
        except zmq.ZMQError as error:
            raise AddressError(f"{self._server}: {error.strerror}") from None

    async def _wait_done(self, timeout_s: float, doing: asyncio.Future[Any]) -> bool:
        """Whether it was done in time. Raises why this client is shut out, if it is."""
        try:
            await asyncio.wait(
                (doing, self._rejection),
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if doing.cancelled():
                raise NotConnected("the client is closed")
            if doing.done():
                doing.result()  # raises what went wrong
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
                f"what listens at {self._server} does not speak ZeroMQ, or is held up"
            )
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.failure_reason = f"the bus at {self._server} does not answer"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == UNKNOWN_KEY:
            self._rejection.set_result(self._unknown_key())
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == OTHER_MECHANISM:
            self._rejection.set_result(self._other_mechanism())
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._keys is not None:
            self.failure_reason = (
                f"the bus at {self._server} hangs up: is server.key its public key?"
            )

    def _unknown_key(self) -> PolybusError:
        who = (
            f"client {client_id.format_client_id(self._keys.client_id)}"
            if self._keys
            else "this client"
        )
        return Denied(
            f"the bus at {self._server} does not know the key of {who}:"
            " allow it there with 'polybus keys allow'"
        )

    def _other_mechanism(self) -> PolybusError:
        if self._keys is None:
            return Denied(f"{self._server} is for clients with a CURVE key: use --curve, or curve=")
        return ConfigError(f"{self._server} does not speak CURVE: leave --curve out, or curve=")

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
