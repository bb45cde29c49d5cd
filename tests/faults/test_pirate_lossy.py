"""Several clients through a proxy that drops, doubles, delays and reorders whole messages.

Each subscriber gets every message of the topic since its SUB once, without a gap. A run also
fails if one kind of fault did not occur. Random choices come from a seed that is printed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.rig.pirate.lossy_round import LossyRound, OpenClient
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.polybus_client import Ours
from tests.rig.pirate.zmq_client import Bare

STEPS, STEPS_SOAKED = 40, 2500


def run_lossy_round(tmp_path: Path, open_client: OpenClient, steps: int) -> str:
    """Return the counts of the round."""
    seed = random.getrandbits(32)
    with (
        PirateBus() as bus,
        LossyRound(tmp_path, bus.endpoint, seed, open_client) as lossy_round,
    ):
        lossy_round.run(steps)
        lossy_round.finish()
        anomalies = lossy_round.anomalies()
        assert not anomalies, f"{lossy_round}: {len(anomalies)} anomalies, {anomalies[:10]}"
        return str(lossy_round)


@pytest.mark.sabotage("stamps-off", expects="doubled")
@pytest.mark.timeout(170)
def test_each_message_arrives_once_over_a_lossy_network(tmp_path):
    summary = run_lossy_round(tmp_path, lambda at, name: Ours(at, tmp_path / name), STEPS)
    print(summary)  # noqa: T201


@pytest.mark.soak
@pytest.mark.sabotage("stamps-off", "replies-off", expects="doubled")
@pytest.mark.timeout(3000)
def test_each_message_arrives_once_over_a_lossy_network_for_minutes(tmp_path, sabotaged, capsys):
    steps = 10 * STEPS if sabotaged else STEPS_SOAKED
    summary = run_lossy_round(tmp_path, lambda at, name: Ours(at, tmp_path / name), steps)
    with capsys.disabled():
        print(f"\n{summary}")  # noqa: T201


@pytest.mark.soak
@pytest.mark.sabotage("stamps-off", "replies-off", expects="doubled")
@pytest.mark.timeout(3000)
def test_plain_zeromq_client_over_a_lossy_network(tmp_path, sabotaged):
    run_lossy_round(tmp_path, Bare.introduced, 10 * STEPS if sabotaged else STEPS_SOAKED)
