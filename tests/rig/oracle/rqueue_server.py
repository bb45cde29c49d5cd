"""An rqueue server that is obviously right, and slow.

Written from docs/spec/rqueue.md with nothing of the bus in it: one coroutine a
connection, one frame at a time, one dict of subscribers. Tests that pass
against it and against the real server show that both mean the same.

    python -m tests.rig.oracle.rqueue_server --port 0

prints the same `listening` and `ready` lines as `polybus rqueue`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import struct
import sys
from asyncio import StreamReader, StreamWriter


class Bad(Exception):
    """The client broke a rule of the wire; the text is the reason's stable name."""


class OracleServer:
    """The rules of the wire, and the subscribers of each topic."""

    def __init__(self, max_payload: int = 2048) -> None:
        self.max_payload = max_payload
        self.subscribers: dict[bytes, dict[StreamWriter, None]] = {}
        self.bad: list[str] = []

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """One connection, from its first frame to its end."""
        try:
            while True:
                kind, payload = await self._read_frame(reader)
                await self._obey(writer, kind, payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Bad as bad:
            self.bad.append(str(bad))
            sys.stderr.write(f"bad frame: {bad}\n")
        finally:
            self._deregister(writer)
            writer.close()

    async def _read_frame(self, reader: StreamReader) -> tuple[int, bytes]:
        length, kind = struct.unpack(">IB", await reader.readexactly(5))
        if length > self.max_payload:
            raise Bad("payload_too_large")
        if kind in (7, 8):
            raise Bad("not_for_server")
        if kind not in (0, 1, 2, 5):
            raise Bad("unknown_type")
        if kind == 5 and length > 0:
            raise Bad("deregister_not_empty")
        return kind, await reader.readexactly(length)

    async def _obey(self, writer: StreamWriter, kind: int, payload: bytes) -> None:
        if kind == 0:
            await self._publish(payload)
        elif kind == 1:
            self.subscribers.setdefault(topic_alone(payload), {})[writer] = None
        elif kind == 2 and payload:
            self.subscribers.get(topic_alone(payload), {}).pop(writer, None)
        else:  # DEREGISTER, also as an empty frame of type 2
            self._deregister(writer)

    async def _publish(self, inner: bytes) -> None:
        topic = inner_topic(inner)
        for subscriber in list(self.subscribers.get(topic, ())):
            try:
                subscriber.write(inner)
                await subscriber.drain()
            except ConnectionError:
                pass  # its own coroutine ends it

    def _deregister(self, writer: StreamWriter) -> None:
        for members in self.subscribers.values():
            members.pop(writer, None)


def topic_alone(payload: bytes) -> bytes:
    """The topic of SUBSCRIBE and REMOVE, which have nothing else."""
    topic, rest = topic_and_rest(payload)
    if rest:
        raise Bad("trailing_bytes")
    return topic


def inner_topic(inner: bytes) -> bytes:
    """The topic of the NOTIFICATION or PART that a PUBLISH holds."""
    if len(inner) < 5 or struct.unpack(">I", inner[:4])[0] != len(inner) - 5:
        raise Bad("inner_length")
    if inner[4] not in (7, 8):
        raise Bad("inner_type")
    topic, rest = topic_and_rest(inner[5:])
    if inner[4] == 8:
        check_part(rest)
    return topic


def check_part(rest: bytes) -> None:
    if len(rest) < 20:
        raise Bad("part_length")
    index, count = struct.unpack(">HH", rest[16:20])
    if index >= count:
        raise Bad("part_index")


def topic_and_rest(payload: bytes) -> tuple[bytes, bytes]:
    if not payload or payload[0] == 0 or payload[0] > len(payload) - 1:
        raise Bad("topic_length")
    return payload[1 : 1 + payload[0]], payload[1 + payload[0] :]


async def run(host: str, port: int, max_payload: int) -> None:
    """Listen, say so, and serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await asyncio.start_server(OracleServer(max_payload).serve, host, port)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"listening rqueue tcp://{host}:{port}\nready\n")
    sys.stdout.flush()
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="the slow and obvious rqueue server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=6567)
    parser.add_argument("--max-payload", type=int, default=2048)
    options = parser.parse_args()
    asyncio.run(run(options.host, options.port, options.max_payload))


if __name__ == "__main__":
    main()
