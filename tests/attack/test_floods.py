"""One user floods a table that is bounded in total: it gets its share, and all others work on.

The tables are small here, so that a flood takes seconds. A share is half of a table, and its
last entry is for admins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.flooder import TABLES, Flooder
from tests.attack.peak_meter import PeakMeter
from tests.attack.whole_bus import check_served, serve_all
from tests.rig import flight_client
from tests.rig.observer import check_unharmed
from tests.rig.soak_runs import SoakRun

CONFIG = """
[limits]
max_connections = 24
max_topics = 8
[quotas]
quota_topics = 4
[server]
max_admin_connections = 16
[native]
max_connections = 24
max_calls = 8
max_waits = 8
max_producers = 8
max_stages = 8
max_groups = 8
max_user_groups = 4
[pirate]
max_clients = 8
"""
SHARE = 4
CONNECTIONS_SHARE = 12
ATTACKER, OTHER, ROOT = 4242, 4243, 0
LONG_S = 10.0
QUOTA = "topics"  # bounded by quota_topics per user, and not in total


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with serve_all(config=CONFIG) as running:
        with flight_client.connect(running) as client:
            flight_client.act(client, "topic.create", topic="flooded", shards=1)
        yield running
        check_unharmed(running)


@pytest.mark.sabotage("share-ignored", expects="another user was refused|share is not exact")
@pytest.mark.parametrize("table", [one for one in TABLES if one != QUOTA])
def test_flood_by_one_user_leaves_room_for_others(bus, table):
    flood(bus, table)


def test_flood_of_topics_ends_at_the_quota(bus):
    flood(bus, QUOTA)


@pytest.mark.soak
@pytest.mark.parametrize("table", TABLES)
def test_flood_for_some_seconds(bus, table):
    """The attacker tries to get more than its share all the time."""
    run = SoakRun(f"attack/test_floods.py ({table})", 0)
    run.record(**flood(bus, table, LONG_S))


def flood(bus: BusProcess, table: str, seconds: float = 0) -> dict[str, float]:
    """Take all that one user gets, and try to get more for some seconds. Returns figures."""
    share = CONNECTIONS_SHARE if table in ("connections", "native connections") else SHARE
    check_served(bus)  # every part has its memory before the measurement
    with (
        Bystander(bus) as bystander,
        PeakMeter(bus) as peak,
        Flooder(table, ATTACKER, bus, 2 * share + 4) as flooder,
    ):
        time.sleep(seconds)  # of the attack
        with Flooder(table, OTHER, bus, 1) as other:
            assert other.held == 1, f"another user was refused: {other.refusal}"
        with Flooder(table, ROOT, bus, 1) as root:
            assert root.held == 1, f"an admin was refused: {root.refusal}"
        assert flooder.held == share, f"the share is not exact: {flooder.refusal}"
    bystander.check_served()
    peak.check_memory()
    if table != "pirate clients":  # its records stay, so a new client has no place
        check_served(bus)
    assert not seconds or flooder.refused > 1, "the attacker did not try again"
    successes = flooder.held - share
    attempts = {"attempts": flooder.refused, "successes": successes}
    return attempts | peak.figures() | bystander.figures()
