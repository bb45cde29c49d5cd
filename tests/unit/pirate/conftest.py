"""Fixtures of the client's tests: a shared real bus, and topics of each test's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polybus.dialects.pirate.client import pirate_blocking
from polybus.dialects.pirate.client.pirate_blocking import BlockingClient
from tests.rig.pirate.gate import ALL, Gate
from tests.rig.pirate.pirate_bus import PirateBus

# Where a message may be lost on purpose the next try comes soon; no test fails because a
# machine is slow.
QUICK: dict[str, Any] = {"timeout_s": 0.3, "tries": 50, "jitter_s": 0.01}
PATIENT: dict[str, Any] = {"timeout_s": 10.0}

Opening = Callable[..., BlockingClient]


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """The endpoint of a bus that the tests share."""
    with PirateBus() as bus:
        yield bus.endpoint


@pytest.fixture
def gate(endpoint: str) -> Iterator[Gate]:
    """A gate to that bus that can drop messages."""
    with Gate(endpoint) as one:
        yield one


@contextmanager
def in_memory() -> Iterator[Path]:
    """A folder for thousands of files and syncs, which need no disk of their own."""
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="pb-pirate-", dir=where) as name:
        yield Path(name)


@contextmanager
def losing(gate: Gate, client: BlockingClient, kind: str = "replies") -> Iterator[None]:
    """Drop all messages of a kind, and shorten the client's timeouts."""
    lane = client._async._require_opened()._counted_channel
    kept, lane._options = lane._options, replace(lane._options, timeout_s=0.15, tries=2)
    setattr(gate, f"lose_{kind}", ALL)
    try:
        yield
    finally:
        setattr(gate, f"lose_{kind}", 0)
        lane._options = kept


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    return str(request.node.nodeid).rpartition("/")[2].replace(",", ";").replace(" ", "_")


@pytest.fixture
def opening(endpoint: str, tmp_path: Path) -> Iterator[Opening]:
    """Open clients, each with a folder of its name, and close them at the end."""
    with ExitStack() as stack:

        def open_one(name: str = "client", server: str = endpoint, **more: Any) -> BlockingClient:
            pace = PATIENT if server == endpoint else QUICK
            more.setdefault("state", tmp_path / name)
            return stack.enter_context(pirate_blocking.connect(server, **pace | more))

        yield open_one


@pytest.fixture
def keeper(opening: Opening, topic: str) -> BlockingClient:
    """Subscribed to the test's topic, so that it exists."""
    client = opening("keeper")
    client.subscribe(topic)
    return client
