"""The bus and its clients are killed with -9 again and again, at random moments.

Each subscriber gets every message of the topic since its SUB once, without a gap. Only a client
that was itself killed may get one message twice, or miss one: the message it was delivering. Its
order of recording and delivering decides which.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.rig.pirate.kill_round import KillRound

KILLS, KILLS_SOAKED, SABOTAGED = 6, 400, 16


def kill_them(tmp_path: Path, kills: int) -> str:
    """Run a round with this number of kills. Returns its summary."""
    with KillRound(tmp_path, random.getrandbits(32)) as round_:
        round_.start()
        round_.kill(kills)
        round_.settle()
        anomalies = round_.anomalies()
        assert not anomalies, f"{round_}: {len(anomalies)} anomalies, {anomalies[:10]}"
        return str(round_)


@pytest.mark.sabotage("replies-off", expects="doubled")
@pytest.mark.timeout(170)
def test_each_message_arrives_once_after_kills(tmp_path, sabotaged):
    summary = kill_them(tmp_path, SABOTAGED if sabotaged else KILLS)
    print(summary)  # noqa: T201


@pytest.mark.soak
@pytest.mark.sabotage("replies-off", "stamps-off", expects="doubled")
@pytest.mark.timeout(3000)
def test_each_message_arrives_once_after_hundreds_of_kills(tmp_path, sabotaged, capsys):
    summary = kill_them(tmp_path, SABOTAGED if sabotaged else KILLS_SOAKED)
    with capsys.disabled():
        print(f"\n{summary}")  # noqa: T201
