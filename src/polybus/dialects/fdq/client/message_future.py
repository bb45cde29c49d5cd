"""Futures for messages that travel together: one each, and all are told at once.

There is one for every message, and what a `Future` makes and locks for itself would take
as long as all else that is done for the message. Those of one batch share a condition
instead, and are told under one hold of it: whoever waits for one wakes when all have
their outcome. To `concurrent.futures` and `asyncio` they are futures like any other.
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
    """Of one message. It was taken, and cannot be called back."""

    def __init__(self, condition: Condition) -> None:
        # In place of Future's own: these are the fields that its methods look at.
        self._condition = condition
        self._state = RUNNING  # so that it cannot be cancelled
        self._result = None
        self._exception = None
        self._waiters = []
        self._done_callbacks = []  # type: ignore[var-annotated]


def resolve_all(
    condition: Condition,
    receipts: Sequence[MessageFuture],
    result: Produced | None,
    error: BaseException | None,
) -> None:
    """Gives all of them this outcome. The condition is theirs."""
    with condition:
        for receipt in receipts:
            receipt._result = result
            receipt._exception = error
            receipt._state = FINISHED
            for waiter in receipt._waiters:
                waiter.add_result(receipt) if error is None else waiter.add_exception(receipt)
        condition.notify_all()
    for receipt in receipts:
        if receipt._done_callbacks:
            receipt._invoke_callbacks()  # type: ignore[attr-defined]
