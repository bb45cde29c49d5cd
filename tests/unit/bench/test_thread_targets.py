"""What `python -m bench rqueue --threads N` judges, and when it does not judge."""

import os
import threading

import pytest

from bench.harness.processes import thread_cpu_s
from bench.harness.results import OURS, RATE, SERVER_CPU, CaseResult, Requirement, Target, Verdict
from bench.harness.rounds import BUSIEST_THREAD, IDLE_CORES, LOAD_CORES, THREAD
from bench.rqueue.threads import ONE_THREAD, IfIdle, MostOf
from bench.rqueue.threads_table import table_row
from tests.rig.observer import until

CASE = "4-pairs"
IF_IDLE = IfIdle(Target(CASE, RATE, (ONE_THREAD,), 1.3), ONE_THREAD, 0.4)
MOST_CPU = MostOf(CASE, "CPU a message", SERVER_CPU, ONE_THREAD, SERVER_CPU, 1.4)
BUSIEST_OF_OWN = MostOf(CASE, "busiest", BUSIEST_THREAD, OURS, SERVER_CPU, 0.75)


def result(
    rate: float = 10.0, cpu: float = 10.0, busiest: float = 10.0, idle: float = 0.5
) -> CaseResult:
    ours = {RATE.key: rate, SERVER_CPU.key: cpu, BUSIEST_THREAD.key: busiest}
    one = {RATE.key: 10.0, SERVER_CPU.key: 10.0, IDLE_CORES: idle, LOAD_CORES: 0.3}
    return CaseResult(CASE, CASE, (RATE,), ({OURS: ours, ONE_THREAD: one},))


def verdict(requirement: Requirement, of: CaseResult) -> Verdict:
    (found,) = requirement.judge([of])
    return found


@pytest.mark.parametrize(("rate", "holds"), [(12.9, False), (13.1, True)])
def test_target_of_pairs_is_judged_with_an_idle_core(rate: float, holds: bool) -> None:
    found = verdict(IF_IDLE, result(rate=rate, idle=0.4))
    assert (found.is_judged, found.holds) == (True, holds)


def test_target_of_pairs_is_not_judged_without_an_idle_core() -> None:
    found = verdict(IF_IDLE, result(rate=9.0, idle=0.39))
    assert (found.is_judged, found.holds) == (False, True)
    assert "39% of a core idle, the load uses 30%" in found.wanted


@pytest.mark.parametrize(("cpu", "holds"), [(13.9, True), (14.1, False)])
def test_cpu_is_limited_by_one_threads(cpu: float, holds: bool) -> None:
    assert verdict(MOST_CPU, result(cpu=cpu)).holds is holds


@pytest.mark.parametrize(("busiest", "holds"), [(14.9, True), (15.1, False)])
def test_busiest_thread_is_limited_by_its_own_server(busiest: float, holds: bool) -> None:
    assert verdict(BUSIEST_OF_OWN, result(cpu=20.0, busiest=busiest)).holds is holds


def test_missing_server_misses_the_target() -> None:
    alone = CaseResult(CASE, CASE, (RATE,), ({OURS: {RATE.key: 1.0, SERVER_CPU.key: 1.0}},))
    for requirement in (IF_IDLE, MOST_CPU):
        found = verdict(requirement, alone)
        assert (found.reached, found.holds) == (None, False)


def test_server_without_a_known_process_has_a_rate_but_no_cpu_ratio() -> None:
    cpu = {RATE.key: 10.0, SERVER_CPU.key: 5.0}
    found = CaseResult(CASE, CASE, (RATE,), ({OURS: {RATE.key: 20.0}, "redis": cpu},))
    assert found.ratio(RATE, ("redis",)) == 2.0
    assert found.ratio(SERVER_CPU, ("redis",)) is None


def test_table_row() -> None:
    one = {RATE.key: 20e6, SERVER_CPU.key: 40.0, BUSIEST_THREAD.key: 40.0}
    two = {RATE.key: 24e6, SERVER_CPU.key: 50.0, BUSIEST_THREAD.key: 30.0}
    two |= {THREAD + "pump-1 11": 30.0, THREAD + "pump-2 12": 19.9, THREAD + "polybus 10": 0.1}
    cells = table_row(CaseResult(CASE, CASE, (RATE,), ({"1": one, "2": two},)), "2", "1")
    assert cells[0] == "2"
    assert cells[4:] == ("50", "1.25×", "30", "60%", "33.3", "1.33×", "pump-1 60%, pump-2 40%")


def test_threads_of_one_name_are_told_apart_in_the_table() -> None:
    two = {RATE.key: 1e6, SERVER_CPU.key: 50.0, BUSIEST_THREAD.key: 30.0}
    two |= {THREAD + "pump 11": 30.0, THREAD + "pump 12": 20.0}
    cells = table_row(CaseResult(CASE, CASE, (RATE,), ({"2": two},)), "2", "2")
    assert cells[-1] == "pump 11 60%, pump 12 40%"


def test_cpu_time_by_thread() -> None:
    def used_s() -> float:
        return sum(s for name, s in thread_cpu_s(os.getpid()).items() if name.endswith(number))

    busy, done = threading.Event(), threading.Event()

    def spin() -> None:
        sum(range(200_000))
        busy.set()
        done.wait()

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        busy.wait()
        number = f" {thread.native_id}"
        assert used_s() > 0
    finally:
        done.set()
        thread.join()
    # `join` returns shortly before the kernel removes the thread. Then it is not counted.
    until(lambda: used_s() == 0, "the ended thread is not counted")


def test_threads_of_an_ended_process() -> None:
    assert thread_cpu_s(2**22 + 1) == {}  # above the largest pid
