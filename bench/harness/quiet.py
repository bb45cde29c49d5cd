"""Was the machine ours while we measured?

The kernel counts the busy time of all CPUs in /proc/stat. What is left after taking away the load
generator and the server under test was used by others: a compiler, a cron job, another server that
still tidies up. Time stolen by the machine's own host counts the same. A measurement with too much
of it is dropped and taken again.
"""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from bench.harness.processes import TICKS_PER_S, cpu_s

# Of the machine's whole time. With compilers and tests beside us on two cores it was 0.3 to 0.8.
ALLOWED_SHARE = 0.05
# The kernel samples busy time at its tick, so short measurements are off by a few of them.
ALLOWED_NOISE_S = 0.03
LOOK_S = 0.25
# Processes of the harness itself that run beside a measurement (awake.py).
OWN_PIDS: set[int] = set()


@dataclass(frozen=True)
class Disturbance:
    """CPU seconds that others used during one measurement."""

    elapsed_s: float
    foreign_s: float
    stolen_s: float

    @property
    def share(self) -> float:
        return (self.foreign_s + self.stolen_s) / (self.elapsed_s * (os.cpu_count() or 1))

    @property
    def is_quiet(self) -> bool:
        allowed_s = ALLOWED_SHARE * self.elapsed_s * (os.cpu_count() or 1) + ALLOWED_NOISE_S
        return self.foreign_s + self.stolen_s <= allowed_s


def _machine_s() -> tuple[float, float]:
    """Busy and stolen seconds of all CPUs since boot."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in first[:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_S, steal / TICKS_PER_S


def _own_s() -> float:
    """CPU seconds of the harness, what runs beside it, and the load generators that have ended."""
    usages = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    beside_s = sum(cpu_s(pid) for pid in OWN_PIDS)
    return beside_s + sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Watch:
    """Started before a measurement, asked after it."""

    def __init__(self, server_pid: int | None) -> None:
        self._pid = server_pid
        self._started_s = time.monotonic()
        self._machine = _machine_s()
        self._ours_s = self._ours()
        self._server_s = self._server()

    def _server(self) -> float:
        return cpu_s(self._pid) if self._pid is not None else 0.0

    def _ours(self) -> float:
        return _own_s() + self._server()

    def server_cpu_s(self) -> float:
        return self._server() - self._server_s

    def cpu_s(self) -> float:
        """CPU seconds of the server, the harness and the load."""
        return self._ours() - self._ours_s

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def disturbance(self) -> Disturbance:
        busy_s, stolen_s = _machine_s()
        foreign_s = (busy_s - self._machine[0]) - (self._ours() - self._ours_s)
        return Disturbance(
            elapsed_s=self.elapsed_s(),
            foreign_s=max(0.0, foreign_s),
            stolen_s=stolen_s - self._machine[1],
        )


def wait_for_quiet(timeout_s: float) -> None:
    """Return when a short look finds no other busy process, or after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        watch = Watch(None)
        time.sleep(LOOK_S)
        if watch.disturbance().is_quiet:
            return


def busy_processes(look_s: float = LOOK_S) -> list[str]:
    """Other processes that use more than the allowed share of one CPU right now."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    before_s = {pid: cpu_s(pid) for pid in pids if pid != os.getpid()}
    time.sleep(look_s)
    busy = []
    for pid, used_s in before_s.items():
        share = (cpu_s(pid) - used_s) / look_s
        if share > ALLOWED_SHARE:
            busy.append(f"{_name(pid)} ({pid}) {share:.0%}")
    return busy


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"
