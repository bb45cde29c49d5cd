"""The services that the request handlers use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from polybus.bus.broker import Logger
from polybus.bus.counters import Counters
from polybus.bus.policy import Policy
from polybus.bus.shares import Shares
from polybus.dialects.pirate.limits import PirateLimits
from polybus.durable.publisher import CallOnLoop
from polybus.durable.push_readers import BlockingWorkRunner
from polybus.durable.topic_names import TopicNames
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import PolybusError, StoreFault, Unavailable
from polybus.model.commit import Commit, CommitResult

# Called on the loop with the result of a request, or with its error.
OnResult = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class SubscriberContext:
    """`run_on_loop` may be called from any thread; `workers` runs blocking calls."""

    durable: DurableTopics
    binding: TopicNames
    policy: Policy
    counters: Counters
    shares: Shares
    limits: PirateLimits
    run_on_loop: CallOnLoop
    workers: BlockingWorkRunner
    clock: Callable[[], float]
    wall_ns: Callable[[], int]
    log: Logger

    def count_refused(self, reason: str) -> None:
        self.counters.count("refused", f"pirate_{reason}")

    def commit(self, commit: Commit, then: Callable[[Future[CommitResult]], None]) -> None:
        """Commit. Calls `then` on the loop when the commit is on disk or has failed."""
        # The store resolves the future on a thread of its own.
        future = self.durable.commit(commit)
        future.add_done_callback(lambda done: self.run_on_loop(partial(then, done)))


def unknown_user_error() -> Unavailable:
    """Return the answer to a denied request of a caller in doubt.

    It is not `Denied`, and it is not stored: the same client may repeat the request on a
    connection whose user is known.
    """
    return Unavailable("the user of this connection is not known; connect again and retry")


def error_from_future(future: Future[Any]) -> PolybusError | None:
    """Return the error of a future as a `PolybusError`, or None."""
    if future.cancelled():
        return StoreFault("the bus is stopping")
    error = future.exception()
    if error is None or isinstance(error, PolybusError):
        return error
    return StoreFault(f"unexpected error: {error!r}")
