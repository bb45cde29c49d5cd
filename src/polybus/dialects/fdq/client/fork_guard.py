"""The process id, cached so that a check per message needs no system call."""

from __future__ import annotations

import os

from polybus.errors import StoreClosed

pid = os.getpid()


def check_process(owner: int, kind: str) -> None:
    """Raise `StoreClosed` if a child process uses an object that its parent made before a fork."""
    if owner != pid:
        raise StoreClosed(
            f"{kind} belongs to process {owner}, the parent of this fork; open another one here"
        )


def _after_fork() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork)
