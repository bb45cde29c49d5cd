"""ZAP (ZeroMQ's RFC 27): who may connect with CURVE is asked here, for each connection.

libzmq asks over an inner socket of the same context, before a peer may send anything. A
key that nobody has let in is refused with 400, which the peer's own socket tells it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

ENDPOINT: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = "pirate"
VERSION: Final = b"1.0"
CURVE: Final = b"CURVE"
HEAD_FRAMES: Final = 6  # version, request, domain, address, routing id, mechanism


class ZapHandler:
    """`may(key)` says whether whoever holds a key may connect; `refused` is told who may not."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        may: Callable[[bytes], bool],
        refused: Callable[[bytes, str], None],
    ) -> None:
        self._is_allowed = may
        self._on_refused = refused
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
                asked = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(asked))

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        request = asked[1] if len(asked) > 1 else b""
        if len(asked) != HEAD_FRAMES + 1 or asked[0] != VERSION or asked[5] != CURVE:
            return [VERSION, request, b"400", b"only CURVE is spoken here", b"", b""]
        key = asked[HEAD_FRAMES]
        if not self._is_allowed(key):
            self._on_refused(key, asked[3].decode("utf-8", "replace"))
            return [VERSION, request, b"400", b"unknown key", b"", b""]
        return [VERSION, request, b"200", b"OK", key.hex().encode(), b""]
