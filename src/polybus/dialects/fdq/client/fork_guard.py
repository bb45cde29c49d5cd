"""Which process this is, without asking the kernel for every message."""

from __future__ import annotations

import os

from polybus.errors import StoreClosed

pid = os.getpid()


def check_process(owner: int, what: str) -> None:
    """`StoreClosed` for whoever uses in a child what its parent has made before a fork."""
    if owner != pid:
        text = f"this {what} belongs to process {owner}, the parent of a fork: make one here"
        raise StoreClosed(text)


def _after_fork() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork)
