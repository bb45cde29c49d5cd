"""Fixtures of the tests of Freud on a live bus. Each module has a `bus` of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.freud_live import connect
from tests.rig.freud_client import OK, Client, create


@pytest.fixture
def client(bus: BusProcess) -> Iterator[Client]:
    with connect(bus) as made:
        yield made


@pytest.fixture
def topic(request: pytest.FixtureRequest, client: Client) -> bytes:
    """A topic of the test's own."""
    name: bytes = request.node.name.encode()[-200:]
    assert client.ask(create(name)).code == OK
    return name
