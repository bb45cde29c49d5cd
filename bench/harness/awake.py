"""Keeps the cores awake while one request at a time is measured.

Client and server then take turns, and both cores have nothing to do most of the time. A core that
has nothing to do goes to sleep, on a virtual machine all the way to its host, and waking it takes
several times as long as everything a server does: one would measure that, and the busier the
machine, the better every server would look. So each core gets a process of the lowest priority
(SCHED_IDLE), which runs only when no other process wants to and yields at once. It is the same for
all servers, and what it uses counts as ours (quiet.py).
"""

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from bench.harness import quiet
from bench.harness.places import compiled


@contextmanager
def awake(further: Iterable[int] = ()) -> Iterator[None]:
    """For the cores of the harness, and further ones where a server was pinned to those."""
    program = compiled("awake", "awake.c")
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0).union(further)):
            stack.enter_context(_spinner([str(program), str(core)]))
        yield


@contextmanager
def _spinner(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command) as process:
        quiet.OWN_PIDS.add(process.pid)
        try:
            yield
        finally:
            process.kill()
            process.wait()  # from now on it is among the children that have ended
            quiet.OWN_PIDS.discard(process.pid)
