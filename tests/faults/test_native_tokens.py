"""Calls end when their token is removed or expires, and a bus may refuse calls without one.

The clients use Arrow Flight alone.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

from polybus.testing.bus_process import BusProcess, StartFailed, serve
from tests.rig.flight_client import SHORT, act, batch, code_of, connect, produce
from tests.rig.observer import check_unharmed, count, until

OPS, OTHER = "ops 0123456789abcdef-ops", "other 0123456789abcdef-other"
BEARER = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer 0123456789abcdef-ops")])


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def write_tokens(folder: Path, *lines: str) -> Path:
    path = folder / "tokens"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


def start(folder: Path, *lines: str, more: str = "") -> BusProcess:
    config = folder / "bus.toml"
    config.write_text(f"[native]\ntokens = '{write_tokens(folder, *lines)}'\n{more}")
    listen = ("native=grpc://127.0.0.1:0", f"admin=unix:{folder}/admin.sock")
    return serve("--config", str(config), "--log-format", "json", listen=listen, folder=folder)


def follow(client: Any) -> None:
    """Follow a topic until the stream ends. Raises its error."""
    stream = client.do_get(flight.Ticket(b'{"topic": "t", "wait_ms": 25000}'), BEARER)
    for _ in stream:
        pass


def wait(client: Any) -> None:
    places = [{"topic": "t", "shard": 0, "offset": 1}]
    act(client, "wait", options=BEARER, positions=places, timeout_ms=25000)


def keep_producing(client: Any) -> None:
    """Produce until the stream ends. Raises its error."""
    descriptor = flight.FlightDescriptor.for_path("produce", "t")
    writer, reader = client.do_put(descriptor, SHORT, BEARER)
    while True:
        writer.write_batch(batch(b"x"))
        if reader.read() is None:
            writer.close()


def produce_once_and_stay(client: Any) -> None:
    """Produce a batch and keep the stream open. Raises the error that ends it."""
    descriptor = flight.FlightDescriptor.for_path("produce", "t")
    writer, reader = client.do_put(descriptor, SHORT, BEARER)
    writer.write_batch(batch(b"x"))
    assert json.loads(reader.read().to_pybytes())["first_id"]
    assert reader.read() is None
    writer.close()


CALLS = [follow, wait, keep_producing, produce_once_and_stay]


def end_of(call: Callable[[Any], None], bus: BusProcess) -> flight.FlightError:
    with connect(bus) as client:
        try:
            call(client)
        except flight.FlightError as error:
            return error
    raise AssertionError(f"{call.__name__} ended without an error")


@pytest.mark.sabotage("tokens-checked-once", expects="the call ends", tries=3)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("loss", ["removed", "expired"])
def test_open_call_ends_with_its_token(folder, call, loss):
    with start(folder, OPS, OTHER) as bus, connect(bus) as client:
        act(client, "topic.create", topic="t", shards=1)
        produce(client, "t", b"first")
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(end_of, call, bus)
            assert not outcome.done()
            time.sleep(0.5)  # the call has begun; one that has not is refused all the same
            expires = datetime.now(UTC) + timedelta(seconds=1)
            left = [f"{OPS} {expires.isoformat()}"] if loss == "expired" else []
            write_tokens(folder, *left, OTHER)
            bus.signal(signal.SIGHUP)
            until(outcome.done, "the call ends", 10)
        error = outcome.result()
        if call is produce_once_and_stay:
            # gRPC cannot end an idle put, so its connection is cut.
            assert isinstance(error, flight.FlightUnavailableError)
            assert count(bus, "connections", "closed", "token") == 1
        else:
            assert isinstance(error, flight.FlightUnauthenticatedError)
            assert code_of(error) == "denied"
        again = end_of(wait, bus)
        assert isinstance(again, flight.FlightUnauthenticatedError)
        check_unharmed(bus)


def test_token_that_stays_keeps_its_calls(folder):
    with start(folder, OPS, OTHER) as bus, connect(bus) as client:
        act(client, "topic.create", topic="t", shards=1)
        descriptor = flight.FlightDescriptor.for_path("produce", "t")
        writer, reader = client.do_put(descriptor, SHORT, BEARER)
        for _ in range(3):
            writer.write_batch(batch(b"x"))
            assert "first_id" in json.loads(reader.read().to_pybytes())
            write_tokens(folder, OPS)
            bus.signal(signal.SIGHUP)
            time.sleep(0.7)  # longer than a call without a token lasts
        writer.close()
        check_unharmed(bus)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_bearer_is_written_in_any_case(folder, scheme):
    header = [(b"authorization", f"{scheme} 0123456789abcdef-ops".encode())]
    with start(folder, OPS) as bus, connect(bus) as client:
        options = flight.FlightCallOptions(headers=header)
        assert act(client, "topic.create", options=options, topic="t")["creator"] == "key:ops"


def test_call_without_a_token_is_refused_if_one_is_required(folder):
    with start(folder, OPS, more="require_token = true\n") as bus, connect(bus) as client:
        with pytest.raises(flight.FlightUnauthenticatedError) as caught:
            act(client, "topic.create", topic="t")
        assert code_of(caught.value) == "denied"
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_get(flight.Ticket(b'{"topic": "t"}')))
        with pytest.raises(flight.FlightUnauthenticatedError):
            produce(client, "t", b"x")
        assert act(client, "topic.create", options=BEARER, topic="t")["creator"] == "key:ops"
        check_unharmed(bus)


def test_required_token_needs_a_file(folder):
    config = folder / "bus.toml"
    config.write_text("[native]\nrequire_token = true\n")
    with pytest.raises(StartFailed) as caught:
        serve("--config", str(config), listen=("native=grpc://127.0.0.1:0",))
    assert "require_token needs a file of tokens" in caught.value.stderr
