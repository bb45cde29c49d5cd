"""Several clients through a proxy that drops, doubles, delays and reorders whole messages.

Each subscriber's messages are the topic's, from its SUB on: no gap, no double. A run in which
some kind of harm was not done fails, too. What is random comes from a seed that is printed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.rig.pirate.lossy_round import MakeTalker, Voyage
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.polybus_client import Ours
from tests.rig.pirate.zmq_client import Bare

STEPS, STEPS_SOAKED = 40, 2500


def sail(tmp_path: Path, talker: MakeTalker, steps: int) -> str:
    """What it went through."""
    seed = random.getrandbits(32)
    with (
        PirateBus() as bus,
        Voyage(tmp_path, bus.endpoint, seed, talker) as voyage,
    ):
        voyage.sail(steps)
        voyage.land()
        anomalies = voyage.anomalies()
        assert not anomalies, f"{voyage}: {len(anomalies)} anomalies, {anomalies[:10]}"
        return str(voyage)


@pytest.mark.sabotage("stamps-off", expects="doubled")
@pytest.mark.timeout(170)
def test_each_message_arrives_once_over_a_lossy_network(tmp_path):
    told = sail(tmp_path, lambda at, name: Ours(at, tmp_path / name), STEPS)
    print(told)  # noqa: T201  # what the run went through


@pytest.mark.soak
@pytest.mark.sabotage("stamps-off", "replies-off", expects="doubled")
@pytest.mark.timeout(3000)
def test_each_message_arrives_once_over_a_lossy_network_for_minutes(tmp_path, sabotaged, capsys):
    steps = 10 * STEPS if sabotaged else STEPS_SOAKED
    told = sail(tmp_path, lambda at, name: Ours(at, tmp_path / name), steps)
    with capsys.disabled():
        print(f"\n{told}")  # noqa: T201  # what there is to tell of it


@pytest.mark.soak
@pytest.mark.sabotage("stamps-off", "replies-off", expects="doubled")
@pytest.mark.timeout(3000)
def test_plain_zeromq_client_over_a_lossy_network(tmp_path, sabotaged):
    sail(tmp_path, Bare.introduced, 10 * STEPS if sabotaged else STEPS_SOAKED)
