"""A client of another user that sends requests and hangs up, at random moments.

    sent = HangUps(4343, port, payloads, seed=1).wait()

It runs in a process of its own, which becomes that user: only root can start it. Each payload is
sent on a new connection, which ends in one of several ways: at once, after a moment, half-closed
first, with a reset, or after a pause within the bytes. Where a protocol begins with a handshake,
some connections wait for the bus's part of it, and others do not.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

HOST = "127.0.0.1"
TIMEOUT_S = 20.0
PIECE = 65536
MEAN_DELAY_S = 200e-6  # about one turn of the bus's event loop
RESET = struct.pack("ii", 1, 0)
WAYS = ("close", "close", "wait", "half", "reset", "pieces")
IMPATIENT = 0.3  # the share of connections that do not wait for a handshake


class Handshake(NamedTuple):
    """The client's part, and how the bus's answer to it ends."""

    opening: bytes = b""
    awaited: bytes = b""


NO_HANDSHAKE = Handshake()


class HangUps:
    """A running client. `wait` returns the number of connections that it made."""

    def __init__(
        self,
        uid: int,
        port: int,
        payloads: Sequence[bytes],
        seed: int,
        handshake: Handshake = NO_HANDSHAKE,
    ) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(uid), str(port), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
            text=True,
        )
        assert self._child.stdin is not None
        texts = [base64.b64encode(one).decode() for one in (*handshake, *payloads)]
        self._child.stdin.write(json.dumps(texts) + "\n")
        self._child.stdin.flush()

    def wait(self) -> int:
        output, _ = self._child.communicate()
        if self._child.returncode:
            raise AssertionError("the client failed")
        return int(output)


def _hang_up(port: int, handshake: Handshake, payload: bytes, rng: random.Random) -> None:
    def pause() -> None:
        time.sleep(rng.expovariate(1 / MEAN_DELAY_S))

    with socket.socket() as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect((HOST, port))
        if rng.random() < IMPATIENT:
            payload = handshake.opening + payload
        elif handshake.opening:
            sock.sendall(handshake.opening)
            received = b""
            while not received.endswith(handshake.awaited):
                piece = sock.recv(PIECE)
                if not piece:
                    return
                received += piece
        way = rng.choice(WAYS)
        if way == "pieces":
            place = rng.randrange(len(payload))
            sock.sendall(payload[:place])
            pause()
            sock.sendall(payload[place:])
        else:
            sock.sendall(payload)
        if way == "half":
            sock.shutdown(socket.SHUT_WR)
        if way != "close":
            pause()
        if way == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def _main(uid: int, port: int, seed: int) -> None:
    rng = random.Random(seed)
    texts = json.loads(sys.stdin.readline())
    opening, awaited, *payloads = [base64.b64decode(text) for text in texts]
    handshake = Handshake(opening, awaited)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    for payload in payloads:
        _hang_up(port, handshake, payload, rng)
    sys.stdout.write(str(len(payloads)))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
