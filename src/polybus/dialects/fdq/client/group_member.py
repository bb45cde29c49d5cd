"""A consumer as a member of its group: it joins, keeps its lease, and joins again.

`Expired` means that the bus has declared the member dead and has assigned its shards to
others. The member drops them and joins again with a new epoch. `Fenced` means that another
consumer has joined under its name, so it stops. An unreachable bus is retried, because
membership survives a restart of the bus.

A member that had no response for `dead_s` starts no runs until it gets one, because its
shards may belong to others already (`lease_until_s`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from polybus.errors import (
    AlreadyExists,
    DoesNotExist,
    Expired,
    Fenced,
    LimitReached,
    PolybusError,
    Unavailable,
)
from polybus.native.client.flight_connection import RetryDelays
from polybus.native.protocol.requests import GroupCommit, GroupJoin

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.consumer import ConsumeOptions
    from polybus.native import Client
    from polybus.native.protocol.answers import Committed
    from polybus.native.protocol.fields import A, Request

T = TypeVar("T")
log = logging.getLogger("polybus.fdq")

RETRYABLE = (Unavailable, LimitReached)
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 2.0


class ConsumerClosing(Exception):
    """Raised in a thread that waits for the bus while the consumer closes."""


class GroupMember:
    """Calls of the group API under the member's current epoch, from any number of threads."""

    def __init__(
        self,
        bus: Client,
        options: ConsumeOptions,
        on_lost: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.epoch = 0
        self.lease_until_s = 0.0
        self.is_leaving = False  # a member that is leaving does not join again
        self.closing = Event()  # set: stop waiting for an unreachable bus
        self._bus = bus
        self._options = options
        self._identity: dict[str, Any] = {
            "topic": options.topic,
            "group": options.group,
            "consumer": options.name,
        }
        self._on_lost = on_lost
        self._clock = clock
        self._lock = Lock()

    def join(self) -> None:
        """Join for the first time. Creates the topic if the options allow it."""
        with self._lock:
            try:
                self._join()
            except DoesNotExist:
                if not self._options.create:
                    raise
                try:
                    self._bus.create_topic(self._options.topic)
                except AlreadyExists:
                    pass
                self._join()

    # --- calls

    def call(self, request: Callable[..., Request[A]], **fields: Any) -> A:
        """Call the bus with a request of this member; `fields` are those of the request alone.

        Raises `Expired` after it has joined again, and `Fenced` if the consumer must stop.
        """
        epoch, asked_s = self.epoch, self._clock()
        try:
            response = self._bus.call(request(**self._identity, epoch=epoch, **fields))
        except (Expired, Fenced) as error:
            raise self._on_refused(error, epoch) from None
        # The bus has seen the member at some time after the request was made.
        self.lease_until_s = max(self.lease_until_s, asked_s + self._options.dead_s)
        return response

    def follow(
        self, **fields: Any
    ) -> Iterator[tuple[dict[str, Any] | None, pa.RecordBatch | None]]:
        """Fetch continuously. The lease counts from the request, not from the rows."""
        epoch, asked_s = self.epoch, self._clock()
        try:
            for response in self._bus.follow(**self._identity, epoch=epoch, **fields):
                self.lease_until_s = max(self.lease_until_s, asked_s + self._options.dead_s)
                yield response
        except (Expired, Fenced) as error:
            raise self._on_refused(error, epoch) from None

    def commit(self, **fields: Any) -> Committed:
        """Commit a transaction. `Fenced` may concern the shard alone, so the handler gets it."""
        epoch = self.epoch
        try:
            return self._bus.call(GroupCommit(**self._identity, epoch=epoch, **fields))
        except Expired:
            self._rejoin(epoch)
            raise

    def retry(
        self, step: Callable[[], T], retryable: tuple[type[PolybusError], ...] = RETRYABLE
    ) -> T:
        """Repeat the step until the bus answers. Raises `ConsumerClosing` if `closing` is set."""
        for pause_s in RetryDelays(FIRST_PAUSE_S, LAST_PAUSE_S):
            try:
                return step()
            except retryable as error:
                log.debug("%s retries: %s", self._options.name, error)
            if self.closing.wait(pause_s):
                raise ConsumerClosing
        raise AssertionError("RetryDelays is endless")  # pragma: no cover

    # --- epochs

    def _on_refused(self, error: PolybusError, epoch: int) -> PolybusError:
        """Join again if the member has expired. Returns the error for the caller."""
        if isinstance(error, Expired):
            self._rejoin(epoch)
            return error
        # A late response to an earlier epoch does not concern the current one.
        with self._lock:
            return error if epoch == self.epoch else Expired(str(error))

    def _rejoin(self, epoch: int) -> None:
        with self._lock:
            if epoch != self.epoch or self.is_leaving:
                return
            options = self._options
            log.warning(
                "%s of %s/%s was declared dead; joining again",
                options.name,
                options.topic,
                options.group,
            )
            self._on_lost()
            self.retry(self._join)

    def _join(self) -> None:
        if self.is_leaving:
            raise ConsumerClosing
        asked_s, options = self._clock(), self._options
        request = GroupJoin(
            **self._identity,
            start=options.start,
            max_deliver=options.max_deliver,
            heartbeat_ms=max(1, round(options.heartbeat_s * 1000)),
            dead_ms=max(1, round(options.dead_s * 1000)),
        )
        self.epoch = self._bus.call(request)["epoch"]
        self.lease_until_s = asked_s + self._options.dead_s
