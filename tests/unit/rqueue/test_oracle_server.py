"""The oracle server's rules, against the golden vectors of clients' frames."""

from __future__ import annotations

import asyncio

import pytest

from tests.rig.oracle.rqueue_server import OracleServer
from tests.vectors.rqueue import Vector, vectors


class Ear:
    """A connection double that keeps the written bytes."""

    def __init__(self) -> None:
        self.heard = b""

    def write(self, data: bytes) -> None:
        self.heard += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def serve(data: bytes) -> tuple[OracleServer, Ear]:
    async def body() -> tuple[OracleServer, Ear]:
        server, ear = OracleServer(), Ear()
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await server.serve(reader, ear)  # type: ignore[arg-type]
        return server, ear

    return asyncio.run(body())


@pytest.mark.parametrize("vector", [one for one in vectors("client") if one.bad], ids=str)
def test_oracle_gives_each_bad_frame_its_reason(vector: Vector):
    assert serve(vector.frame)[0].bad == [vector.bad]


@pytest.mark.parametrize("vector", [one for one in vectors("client") if one.value], ids=str)
def test_oracle_executes_valid_frames(vector: Vector):
    assert vector.value is not None
    topic = vector.value.get("topic", b"t")
    subscribe = (len(topic) + 1).to_bytes(4, "big") + b"\x01" + bytes([len(topic)]) + topic
    server, ear = serve(subscribe + vector.frame)
    assert server.bad == []
    assert ear.heard == (vector.frame[5:] if "publish" in vector.value["type"] else b"")
