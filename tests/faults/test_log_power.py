"""Power cuts and kills of a process that writes a file log.

The rig is that of test_store_power.py and test_store_kill.py; `tests.rig.store.log_child` has
the workload, which wraps around its segments many times, and its check.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.faults.test_store_kill import await_lines, demand_no_faults
from tests.faults.test_store_power import PowerCuts, library, memory_folder  # noqa: F401
from tests.rig.fork_server import ChildServer
from tests.rig.store.child import reports

CHILD = "tests.rig.store.log_child"
APPENDS = 120  # of a life
LIVES = 3
IMAGES = 60
SOAK_IMAGES = 1000
ROUNDS = 40
SOAK_ROUNDS = 1000
LINES = (0, 1, 3, 20, 100)  # of the report, to wait for before the kill
LONGEST_S = 0.01
ENDLESS = 10_000_000
FAULT = r"image \d+: cut at record \d+"


@pytest.fixture
def cuts(library, tmp_path, memory_folder) -> PowerCuts:  # noqa: F811
    return PowerCuts(library, tmp_path, memory_folder, CHILD)


@pytest.mark.sabotage("log-sync-off", expects=FAULT)
@pytest.mark.sabotage("log-checksum-off", "log-stale-accepted", expects=FAULT, tries=3)
@pytest.mark.sabotage("log-reused-early", expects=FAULT, tries=3)
def test_power_cut_keeps_acknowledged_records(cuts):
    cuts.record("record", "fsync", APPENDS, LIVES)
    cuts.look(IMAGES)


@pytest.mark.sabotage("log-recovery-unsynced", expects=FAULT, tries=3)
def test_power_cut_with_intervals_keeps_what_was_synced_and_a_prefix(cuts):
    cuts.record("record", "interval", APPENDS, LIVES)
    cuts.look(IMAGES, strict=False)


def kill_writers(tmp_path, durability: str, rounds: int) -> tuple[int, int]:
    """Return the kills, and the records that were acknowledged."""
    seed = random.randrange(1 << 32)
    choices = random.Random(seed)
    folder, report = tmp_path / "log", tmp_path / "report"
    with ChildServer(CHILD) as server:
        for number in range(rounds):
            before = len(reports(str(report)))
            child = server.start("live", str(folder), str(report), durability, ENDLESS)
            await_lines(report, before + choices.choice(LINES), child)
            time.sleep(choices.uniform(0, LONGEST_S))
            child.kill()
            try:
                demand_no_faults(child.wait())
            except AssertionError as error:
                error.add_note(f"seed {seed}, round {number}")
                raise
        demand_no_faults(server.run("live", str(folder), str(report), durability, 0))
    stored = [int(line[2:]) for line in reports(str(report)) if line[0] == "s"]
    return rounds, max(stored)


@pytest.mark.sabotage("log-stale-accepted", "log-reused-early", expects="record|numbers")
def test_acknowledged_records_survive_kills(tmp_path):
    kills, stored = kill_writers(tmp_path, "fsync", ROUNDS)
    assert stored > kills


def test_kill_loses_no_record_that_was_written_with_intervals(tmp_path):
    kills, stored = kill_writers(tmp_path, "interval", ROUNDS // 2)
    assert stored > kills


@pytest.mark.soak
@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_many_power_cuts_and_kills(cuts, tmp_path, durability):
    cuts.record("record", durability, 3 * APPENDS, 2 * LIVES)
    cuts.look(SOAK_IMAGES, strict=durability == "fsync")
    kill_writers(tmp_path, durability, SOAK_ROUNDS)
