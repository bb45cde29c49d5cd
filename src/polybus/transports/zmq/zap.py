"""The ZAP handler (ZeroMQ RFC 27), which decides which CURVE keys may connect.

libzmq asks it over an inproc socket of the same context, before a peer may send anything. An
unknown key is refused with 400, which the peer's own socket reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

ENDPOINT: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = "polybus"
VERSION: Final = b"1.0"
CURVE: Final = b"CURVE"
HEAD_FRAMES: Final = 6  # version, request, domain, address, routing id, mechanism


class ZapHandler:
    """`is_allowed(key)` decides; `on_refused(key, address)` is called for each refused key."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        is_allowed: Callable[[bytes], bool],
        on_refused: Callable[[bytes, str], None],
    ) -> None:
        self._is_allowed = is_allowed
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._loop.add_reader(self._socket.FD, self._read)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(0)

    def _read(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(request))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        if len(request) != HEAD_FRAMES + 1 or request[0] != VERSION or request[5] != CURVE:
            return [VERSION, request_id, b"400", b"CURVE is required", b"", b""]
        key = request[HEAD_FRAMES]
        if not self._is_allowed(key):
            self._on_refused(key, request[3].decode("utf-8", "replace"))
            return [VERSION, request_id, b"400", b"unknown key", b"", b""]
        return [VERSION, request_id, b"200", b"OK", key.hex().encode(), b""]
