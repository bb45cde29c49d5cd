"""A new certificate: a new service on the same port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.flight as flight
import pytest

from polybus.errors import AddressInUse, ConfigError
from polybus.model.address import Address
from polybus.model.limits import NativeLimits
from polybus.transports.flight import flight_listener as module
from polybus.transports.flight.authentication import TokenFile
from polybus.transports.flight.flight_listener import (
    FlightListener,
    SecurityOptions,
    SlowConsumerLimits,
)
from tests.rig.certificates import write_certificate
from tests.rig.observer import until


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[FlightListener]:
    write_certificate(tmp_path)
    made = FlightListener(
        Address.parse("grpc+tls://127.0.0.1:0"),
        SimpleNamespace(list_actions=list, begin_call=lambda one: None, end_call=lambda one: None),
        NativeLimits(),
        SecurityOptions(
            TokenFile(None, time.time),
            certificate=tmp_path / "cert.pem",
            key=tmp_path / "key.pem",
        ),
        SlowConsumerLimits(10.0, 1),
        time.monotonic,
        lambda: 0,
        SimpleNamespace(info=lambda text, **fields: None),
        lambda error: None,
        lambda reason: None,
        lambda: None,
        lambda reason, calls: None,
    )
    yield made
    asyncio.run(made.drain(5.0))


def answers(listener: FlightListener, folder: Path) -> bool:
    own: Any = [("grpc.use_local_subchannel_pool", 1)]
    root = (folder / "cert.pem").read_bytes()
    location = f"grpc+tls://127.0.0.1:{listener.address.port}"
    with flight.connect(location, tls_root_certs=root, generic_options=own) as client:
        try:
            return client.list_actions(flight.FlightCallOptions(timeout=10)) == []
        except flight.FlightError:
            return False


def test_port_reopens_after_a_failed_reload(listener, tmp_path, monkeypatch):
    def taken(address: object) -> None:
        raise AddressInUse("another process was quicker")

    write_certificate(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_check_address_free", taken)
        patch.setattr(module, "STOP_TIMEOUT_S", 0.0)
        with pytest.raises(ConfigError, match="quicker"):
            listener.reload()
        assert not answers(listener, tmp_path)
    until(lambda: answers(listener, tmp_path), "the port is open again")
