"""What /proc tells of processes: CPU time, memory, who owns a port."""

import os
import time
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TCP_LISTEN = "0A"  # the state column of /proc/net/tcp


def cpu_s(pid: int) -> float:
    """CPU seconds that the process has used, all its threads; 0 when it is gone."""
    try:
        # The clock of another process (CPUCLOCK_SCHED): in nanoseconds, where /proc has ticks.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def thread_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of each of its threads, by name and number; empty when the process is gone."""
    tasks = Path(f"/proc/{pid}/task")
    used_s: dict[str, float] = {}
    for folder in tasks.iterdir() if tasks.exists() else ():
        with suppress(OSError):  # the thread has ended
            name = (folder / "comm").read_text().strip()
            # In nanoseconds, where the file `stat` has ticks.
            run_ns = int((folder / "schedstat").read_text().split()[0])
            used_s[f"{name} {folder.name}"] = run_ns / 1e9
    return used_s


def resident_bytes(pid: int) -> int:
    """Memory that the process holds right now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _listening_inode(port: int) -> str | None:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            return fields[9]
    return None


def _holds(folder: Path, target: str) -> bool:
    try:
        return any(str(link.readlink()) == target for link in (folder / "fd").iterdir())
    except OSError:
        return False


def listener_pid(port: int) -> int | None:
    """The process that listens on a loopback port, if we may see it."""
    inode = _listening_inode(port)
    folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())
    for folder in folders if inode else ():
        if _holds(folder, f"socket:[{inode}]"):
            return int(folder.name)
    return None
