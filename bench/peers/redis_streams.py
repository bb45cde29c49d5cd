"""Redis Streams with an append-only file that is synced before anything is answered.

A batch is a pipeline of XADDs; redis syncs once for all that it has read in one turn of its loop.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness.load import Hello, Party, Plan
from bench.harness.places import installed
from bench.harness.programs import Program, free_port
from bench.peers.redis import array
from bench.store.contract import RunningLog

NAME = "Redis Streams"
# The file is never rewritten while we measure: that would be work for nothing.
OPTIONS = (
    *("--bind", "127.0.0.1"),
    *("--save", ""),
    *("--appendonly", "yes"),
    *("--appendfsync", "always"),
    *("--auto-aof-rewrite-percentage", "0"),
    *("--daemonize", "no"),
)


def _plan(port: int, producers: int, bodies: list[bytes]) -> Plan:
    batch = b"".join(array(b"XADD", b"bench", b"*", b"b", body) for body in bodies)
    party = Party(port, Hello(array(b"PING"), until=b"+PONG\r\n"), batch)
    answers = {"answers": f"{len(bodies)} $ -"}
    return Plan("answered", (party,) * producers, (), settings=answers)


class RedisStreams:
    name = NAME

    @contextmanager
    def start(self, folder: Path) -> Iterator[RunningLog]:
        binary = installed("redis-server", "apt-get install redis-server")
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"v=(\S+)", said.stdout)
        port, place = free_port(), folder / "redis"
        place.mkdir()
        options = ["--port", str(port), "--dir", str(place), *OPTIONS]
        with Program("redis-streams", [str(binary), *options]) as program:
            program.wait_listening(port)
            yield RunningLog(
                program.pid,
                version[1] if version else "?",
                lambda producers, bodies: _plan(port, producers, bodies),
            )
