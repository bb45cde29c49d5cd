"""Futures of the messages of one batch, which are resolved together.

A plain `Future` creates a condition and takes its lock for every message, which costs as much
as all other work on the message. The futures of one batch share a condition instead and are
resolved under one hold of it. `concurrent.futures` and `asyncio` accept them as futures.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from threading import Condition
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.native import Produced


class MessageFuture(Future["Produced"]):
    """The future of one message. It cannot be cancelled, because the message is queued."""

    def __init__(self, condition: Condition) -> None:
        # Set the fields of Future directly; Future.__init__ would create a condition.
        self._condition = condition
        self._state = RUNNING  # a running future cannot be cancelled
        self._result = None
        self._exception = None
        self._waiters = []
        self._done_callbacks = []  # type: ignore[var-annotated]


def resolve_all(
    condition: Condition,
    futures: Sequence[MessageFuture],
    result: Produced | None,
    error: BaseException | None,
) -> None:
    """Resolve all futures with the same outcome. `condition` is the one that they share."""
    with condition:
        for future in futures:
            future._result = result
            future._exception = error
            future._state = FINISHED
            for waiter in future._waiters:
                waiter.add_result(future) if error is None else waiter.add_exception(future)
        condition.notify_all()
    # Callbacks run outside of the lock, because they may use other futures of the batch.
    for future in futures:
        if future._done_callbacks:
            future._invoke_callbacks()  # type: ignore[attr-defined]
