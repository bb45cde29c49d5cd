"""FDQ under random faults: consumers, producers and the bus are stopped, killed and paused.

Each round ends when every produced message is acked. Then the checker compares the journals of
the clients with the content of the bus: no message is lost or duplicated, every key is in
order, refused messages are invisible, fenced members have changed nothing, and the stats equal
a recount.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.rig.fdq.message_plan import (
    CALM,
    DEADLY,
    EXIT,
    FLAKY,
    MOVED,
    PLAIN,
    POISON,
    SLOW,
)
from tests.rig.fdq.settings import (
    KILL,
    KILL_BUS,
    KILL_PRODUCER,
    KILL_RESHARD,
    KILL_UNHEARD,
    PAUSE,
    RESHARD,
    START,
    STOP,
    TO_ALL,
    TO_CONSUMERS,
    WITH_RESHARDS,
    Settings,
)
from tests.rig.fdq.verdict import Verdict
from tests.rig.fdq.workload import MOST_DONE, Workload
from tests.rig.soak_runs import SoakRun

FAULTS = 5
KILLS, MOST_KILLS = 3, 12
PAUSES, MOST_PAUSES = 2, 20
SOAK_S, SABOTAGED_S = 300.0, 60.0
UNHURRIED = {"handler_timeout_s": 120.0}  # long: a run must not time out on a stopped machine


def workload(tmp_path: Path, settings: Settings) -> Workload:
    seed = random.randrange(1 << 32)
    return Workload(tmp_path, seed, settings)


def judged(work: Workload) -> Verdict:
    work.settle()
    verdict = work.verdict()
    print(f"seed {work.seed}: {verdict}")  # noqa: T201
    assert verdict.found.topic, "nothing was produced: nothing was shown"
    assert not verdict.anomalies, f"seed {work.seed}: {verdict}"
    return verdict


@pytest.mark.sabotage("fencing-off", expects=r"\d+ (duplicated|stale-ack)")
@pytest.mark.timeout(170)
def test_resumed_consumers_change_nothing(tmp_path, sabotaged):
    settings = Settings(mix=CALM, orders=UNHURRIED)
    with workload(tmp_path, settings) as work:
        work.start()
        for done in range(2 * PAUSES if sabotaged else MOST_PAUSES):
            if done >= PAUSES and work.refused():
                break
            work.go_on(100)
            work.do(PAUSE)
        verdict = judged(work)
    assert verdict.refused, "no call was refused as late, so the round proves nothing"


@pytest.mark.timeout(170)
def test_consumers_join_leave_and_are_killed(tmp_path):
    with workload(tmp_path, Settings(faults=TO_CONSUMERS)) as work:
        work.start()
        work.disturb(FAULTS)
        judged(work)


@pytest.mark.sabotage("stamps-off", expects=r"\d times in the topic")
@pytest.mark.sabotage("repeats-off", expects=r"\d times among the outputs")
@pytest.mark.timeout(170)
def test_bus_is_killed_under_all_clients(tmp_path, sabotaged):
    """Every other time after a transaction was committed and before it was answered."""
    settings = Settings(mix=CALM, is_relayed=True, orders=UNHURRIED)
    with workload(tmp_path, settings) as work:
        work.start()
        for done in range(MOST_KILLS):
            if done >= KILLS and (work.repeated() or sabotaged):
                break
            work.go_on(60)
            work.do(KILL_BUS if done % 2 else KILL_UNHEARD)
        judged(work)
        assert work.repeated(), "every transaction was answered: nothing was shown"


@pytest.mark.sabotage("seal-ignored", expects=r"\d+ reordered")
@pytest.mark.timeout(170)
def test_topic_is_resharded_under_all_clients(tmp_path):
    """The consumers are slower than the producers, so every reshard finds a backlog."""
    settings = Settings(mix=CALM, orders={**UNHURRIED, "work_s": 0.02})
    faults = (RESHARD, KILL, RESHARD, KILL_RESHARD, STOP, RESHARD, KILL_PRODUCER, RESHARD)
    with workload(tmp_path, settings) as work:
        work.start()
        for name in faults:
            work.go_on(60)
            work.do(name)
        judged(work)


def test_counts_are_exact_without_kills(tmp_path):
    mix, faults = {PLAIN: 6, MOVED: 3, FLAKY: 1}, {START: 1, STOP: 1}
    orders = {"dead_s": 120.0, "work_s": 0.03, **UNHURRIED}  # long enough that draining is visible
    settings = Settings(mix=mix, faults=faults, orders=orders, is_exact=True)
    with workload(tmp_path, settings) as work:
        work.start()
        work.disturb(FAULTS, most_done=60)
        verdict = judged(work)
    assert sum(shard.redelivered for shard in verdict.found.shards)


@pytest.mark.timeout(170)
def test_handlers_that_raise_hang_and_exit(tmp_path):
    mix = {PLAIN: 200, FLAKY: 20, POISON: 5, SLOW: 2, EXIT: 2}
    settings = Settings(mix=mix, producers=0, faults={})
    with workload(tmp_path, settings) as work:
        work.start()
        work.produce("w0", most_messages=200)
        work.produce("deadly", most_messages=1, mix={DEADLY: 1})
        work.finish()
        verdict = judged(work)
    assert any(DEADLY in letter.body for letter in verdict.found.dead)


@pytest.mark.soak
@pytest.mark.sabotage("fencing-off", expects=r"\d+ (duplicated|stale-ack)")
@pytest.mark.sabotage("stamps-off", expects=r"\d times in the topic")
@pytest.mark.timeout(3000)
def test_all_faults_for_minutes(tmp_path, sabotaged, capsys):
    faults = {**TO_ALL, KILL_UNHEARD: 1}
    settings = Settings(faults=faults, is_relayed=True)
    with workload(tmp_path, settings) as work:
        work.start()
        disturb_for(work, SABOTAGED_S if sabotaged else SOAK_S)
        verdict = judged(work)
    with capsys.disabled():
        print(f"\n{SOAK_S:g} s: {verdict}")  # noqa: T201


@pytest.mark.soak
@pytest.mark.sabotage("seal-ignored", expects=r"\d+ reordered")
@pytest.mark.timeout(3000)
def test_reshards_among_all_faults_for_minutes(tmp_path, sabotaged, capsys):
    settings = Settings(faults=WITH_RESHARDS, orders={"work_s": 0.01})
    with workload(tmp_path, settings) as work:
        run = SoakRun("faults/test_fdq_rounds.py", work.seed)
        work.start()
        disturb_for(work, SABOTAGED_S if sabotaged else SOAK_S, most_done=40)
        verdict = judged(work)
    with capsys.disabled():
        print(f"\n{work.resharded} reshards: {verdict}")  # noqa: T201  # what there is to tell of it
    run.record(reshards=work.resharded, messages=len(verdict.found.topic), anomalies=0)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_many_deaths_over_few_shards(tmp_path):
    settings = Settings(shards=2, consumers=5, faults={KILL: 3, KILL_BUS: 1, PAUSE: 1})
    with workload(tmp_path, settings) as work:
        work.start()
        disturb_for(work, SOAK_S / 2)
        judged(work)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_arrow_batches_are_acked_once(tmp_path):
    orders = {"batch": True, "pause_s": 0.005}
    with workload(tmp_path, Settings(mix={PLAIN: 1}, faults=TO_ALL, orders=orders)) as work:
        work.start()
        disturb_for(work, SOAK_S / 2)
        judged(work)


def disturb_for(work: Workload, seconds: float, most_done: int = MOST_DONE) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        work.disturb(1, most_done)
