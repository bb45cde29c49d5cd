"""One user floods a table that is bounded in total: it gets its share, and all others work on.

The tables are small here, so that a flood takes seconds. A share is half of a table, and its
last entry is for admins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.flooder import TABLES, Flooder
from tests.attack.whole_bus import check_served, serve_all
from tests.rig import flight_client
from tests.rig.observer import check_unharmed

CONFIG = """
[limits]
max_connections = 24
max_topics = 8
[quotas]
quota_topics = 4
[server]
max_admin_connections = 16
[native]
max_calls = 8
max_waits = 8
max_producers = 8
max_stages = 8
max_groups = 8
max_user_groups = 4
[pirate]
max_clients = 8
"""
TOTAL, SHARE = 8, 4
CONNECTIONS_SHARE = 12
ATTACKER, OTHER, ROOT = 4242, 4243, 0
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


@pytest.mark.sabotage("share-ignored", expects="another user was refused")
@pytest.mark.parametrize("table", [one for one in TABLES if one != QUOTA])
def test_flood_by_one_user_leaves_room_for_others(bus, table, record_property):
    flood(bus, table, record_property)


def test_flood_of_topics_ends_at_the_quota(bus, record_property):
    flood(bus, QUOTA, record_property)


def flood(bus: BusProcess, table: str, record_property: Callable[[str, object], None]) -> None:
    share = CONNECTIONS_SHARE if table == "connections" else SHARE
    with (
        Bystander(bus) as bystander,
        Flooder(table, ATTACKER, bus, 2 * share + 4) as flooder,
    ):
        with Flooder(table, OTHER, bus, 1) as other:
            assert other.held == 1, f"another user was refused: {other.refusal}"
        with Flooder(table, ROOT, bus, 1) as root:
            assert root.held == 1, f"an admin was refused: {root.refusal}"
        assert flooder.held == share, f"the share is not exact: {flooder.refusal}"
    assert bystander.publish.number, "the bystander could not publish"
    assert bystander.stats.number, "the bystander got no stats"
    for name, value in bystander.figures().items():
        record_property(name, value)
    if table != "pirate clients":  # its records stay, so a new client has no place
        check_served(bus)
