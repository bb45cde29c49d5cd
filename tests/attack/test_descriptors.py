"""Idle connections under a small descriptor limit: every port still serves a new client."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from polybus.errors import ConnectionLost
from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.flooder import IDLE, NEW, Flooder
from tests.attack.peak_meter import PeakMeter
from tests.attack.whole_bus import LISTEN, REQUESTS, check_served
from tests.rig.observer import check_unharmed, log_lines, until
from tests.rig.soak_runs import SoakRun

LIMIT = 256
CONNECTIONS = 300  # per port: more than there are descriptors
ATTACKER = 4242
LONG_S = 60.0
REQUESTS_EACH, LONG_REQUESTS_EACH = 300, 2500
RELOADS = 20
LIBRARY = ["new at pirate"] * 5  # libzmq accepts these, and the bus counts them afterwards
LIMITED = (
    "import resource; "
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT})); "
    "from polybus.cli.main import main; main()"
)
# A library in the bus's process that takes every descriptor from the moment that the file exists.
GREEDY = """
import os, pathlib, threading, time
def take():
    while not pathlib.Path({begin!r}).exists():
        time.sleep(0.01)
    while True:
        try:
            os.dup(0)
        except OSError:
            time.sleep(0.001)
threading.Thread(target=take, daemon=True).start()
"""

# A client of the rig whose connection is closed at once, as some are at first, leaves its socket
# to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@contextmanager
def serve_limited(folder: Path, program: str = LIMITED) -> Iterator[BusProcess]:
    listen = [word for one in LISTEN for word in ("--listen", one.format(folder=folder))]
    (folder / "bus.toml").write_text("")  # read again on SIGHUP
    config = ("--config", str(folder / "bus.toml"))
    command = [sys.executable, "-c", program, "serve", *config, *listen, "--log-format", "json"]
    with BusProcess(command, folder=folder) as running:
        yield running
        check_unharmed(running)


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with a short name, which other users may look into."""
    folder = Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def bus(folder: Path) -> Iterator[BusProcess]:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with serve_limited(folder) as running:
        yield running


def is_served(bus: BusProcess) -> bool:
    try:
        check_served(bus)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("table", IDLE)
def test_idle_connections_of_one_port_leave_descriptors_for_the_others(bus, table):
    check_served(bus)
    with Flooder(table, ATTACKER, bus, CONNECTIONS):
        until(lambda: is_served(bus), "new clients are served", 30)


def test_idle_connections_of_all_ports_leave_descriptors_for_new_clients(bus):
    check_served(bus)
    with ExitStack() as stack:
        for table in IDLE:
            stack.enter_context(Flooder(table, ATTACKER, bus, CONNECTIONS))
        until(lambda: is_served(bus), "new clients are served", 30)


def ask_once_connected(bus: BusProcess, dialect: str) -> None:
    """Ask as a new client, which waits while the kernel's queue of the listener is full."""
    while True:
        try:
            REQUESTS[dialect](bus)
        except BlockingIOError:  # the clients of the rig have a timeout, so they do not wait there
            time.sleep(0.01)
        else:
            return


def ask_while_connections_keep_coming(bus: BusProcess, each: int) -> None:
    """Ask as new clients of admin and Freud, while every port is flooded with new connections."""
    with ExitStack() as stack:
        for table in (*NEW, *LIBRARY):
            stack.enter_context(Flooder(table, ATTACKER, bus, CONNECTIONS))
        closed = Counter[str]()
        for _ in range(each):
            for dialect in ("admin", "freud"):
                try:
                    ask_once_connected(bus, dialect)
                except (ConnectionLost, OSError, EOFError) as error:
                    closed[f"{dialect}: {error!r}"] += 1
        assert not closed, f"of {each} requests each, the bus has not served {dict(closed)}"


def open_descriptors(bus: BusProcess) -> int:
    return len(list(Path(f"/proc/{bus.pid}/fd").iterdir()))


@pytest.mark.sabotage("no-descriptor-reserve", expects="not served|connections waited")
def test_reserve_serves_while_a_library_takes_every_descriptor(folder):
    begin = folder / "take"
    with serve_limited(folder, GREEDY.format(begin=str(begin)) + LIMITED) as bus:
        check_served(bus)
        taken = open_descriptors(bus)
        begin.touch()
        until(lambda: open_descriptors(bus) > taken, "the library takes descriptors")
        for _ in range(REQUESTS_EACH):
            for dialect in ("admin", "freud"):
                try:
                    REQUESTS[dialect](bus)
                except (ConnectionLost, OSError, EOFError) as error:
                    pytest.fail(f"{dialect} is not served: {error!r}")
        refused = ask(bus.admin_path, "stats")["refused"]
        assert "no_descriptor" not in refused, "connections waited for a descriptor"


def test_admin_and_freud_are_served_while_connections_keep_coming(bus):
    check_served(bus)
    ask_while_connections_keep_coming(bus, REQUESTS_EACH)


def has_reloaded(bus: BusProcess, times: int) -> bool:
    """Return whether the rules were read again so many times, or a reload has failed."""
    reloads = len(log_lines(bus, event="reloaded", what="policy"))
    return reloads >= times or bool(log_lines(bus, event="reload failed"))


def test_rules_are_reloaded_while_connections_keep_coming(bus):
    """A caller must not keep a revoked right by a flood."""
    check_served(bus)
    with ExitStack() as stack:
        for table in NEW:
            stack.enter_context(Flooder(table, ATTACKER, bus, CONNECTIONS))
        for number in range(RELOADS):
            bus.signal(signal.SIGHUP)
            until(partial(has_reloaded, bus, number + 1), "a reload ends", 30)
            assert log_lines(bus, event="reload failed") == [], "a reload failed"


@pytest.mark.soak
def test_admin_and_freud_are_served_while_connections_keep_coming_for_long(bus):
    check_served(bus)
    run = SoakRun("attack/test_descriptors.py (new connections)", 0)
    with Bystander(bus) as bystander, PeakMeter(bus) as peak:
        ask_while_connections_keep_coming(bus, LONG_REQUESTS_EACH)
    bystander.check_served()
    peak.check_memory()
    requests = LONG_REQUESTS_EACH
    run.record(
        admin_requests=requests,
        freud_requests=requests,
        unserved=0,
        **peak.figures(),
        **bystander.figures(),
    )


@pytest.mark.soak
def test_idle_connections_of_all_ports_for_a_minute(bus):
    """Users come and go, each with more idle connections than there are descriptors."""
    check_served(bus)
    run = SoakRun("attack/test_descriptors.py (idle connections)", 0)
    attempts = 0
    end_s = time.monotonic() + LONG_S
    with Bystander(bus) as bystander, PeakMeter(bus) as peak:
        while time.monotonic() < end_s:
            with ExitStack() as stack:
                for table in IDLE:
                    stack.enter_context(Flooder(table, ATTACKER, bus, CONNECTIONS))
                    attempts += CONNECTIONS
                until(lambda: is_served(bus), "new clients are served", 30)
    bystander.check_served()
    peak.check_memory()
    run.record(attempts=attempts, successes=0, **peak.figures(), **bystander.figures())
