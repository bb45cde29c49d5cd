"""A consumer as a member of its group: it joins, gives signs of life, and joins again.

`Expired` means that the bus took it for dead: its shards are others' by now, so it
forgets them and joins as somebody new. `Fenced` means that another one goes by its
name: it stops. A bus that is away is waited for: membership outlives its restart.

Whoever has not been answered for as long as it takes to be taken for dead starts
nothing more until it is: its shards may be others' already (`lease_until_s`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.consume_options import ConsumeOptions
    from polybus.native.bus_client import BusClient

T = TypeVar("T")
log = logging.getLogger("polybus.fdq")

# What a later try may mend.
RETRYABLE = (Unavailable, LimitReached)
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 2.0


class ConsumerClosing(Exception):
    """The consumer is being closed, and no longer waits for anything."""


class GroupMember:
    """For any number of threads."""

    def __init__(
        self,
        bus: BusClient,
        terms: ConsumeOptions,
        on_lost: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.epoch = 0
        self.lease_until_s = 0.0
        self.is_leaving = False  # whoever is about to leave need not be a member again
        self.closing = Event()  # no more waiting for a bus that is away
        self._bus = bus
        self._terms = terms
        self._on_lost = on_lost
        self._clock = clock
        self._lock = Lock()

    # --- being one

    def join(self) -> None:
        """For the first time; what is wrong with it is told to who asked."""
        with self._lock:
            try:
                self._join()
            except DoesNotExist:
                if not self._terms.create:
                    raise
                self._create_topic()
                self._join()

    # --- calls

    def act(self, name: str, **fields: Any) -> dict[str, Any]:
        """One call. `Expired`: it has joined again meanwhile; `Fenced`: it is to stop."""
        epoch, asked_s = self.epoch, self._clock()
        with self._translating_fences(epoch):
            answer = self._bus.act(name, **self._identity_fields(epoch), **fields)
        self._extend_lease(asked_s)
        return answer

    def follow(
        self, **fields: Any
    ) -> Iterator[tuple[dict[str, Any] | None, pa.RecordBatch | None]]:
        """A fetch that goes on. It was a sign of life when it began, and not when rows come."""
        epoch, asked_s = self.epoch, self._clock()
        with self._translating_fences(epoch):
            for told in self._bus.follow(**self._identity_fields(epoch), **fields):
                self._extend_lease(asked_s)
                yield told

    def commit(self, **fields: Any) -> dict[str, Any]:
        """A transaction; here `Fenced` may be about its shard alone, and is the handler's."""
        epoch = self.epoch
        try:
            return self._bus.act("group.commit", **self._identity_fields(epoch), **fields)
        except Expired:
            self._rejoin(epoch)
            raise

    def retry(
        self, step: Callable[[], T], passing: tuple[type[PolybusError], ...] = RETRYABLE
    ) -> T:
        """Tries again what failed for want of a bus, until there is one."""
        for pause_s in RetryDelays(FIRST_PAUSE_S, LAST_PAUSE_S):
            try:
                return step()
            except passing as error:
                log.debug("%s waits: %s", self._terms.name, error)
            if self.closing.wait(pause_s):
                raise ConsumerClosing
        raise AssertionError("pauses have no end")  # pragma: no cover

    # --- inside

    def _identity_fields(self, epoch: int) -> dict[str, Any]:
        terms = self._terms
        who = {"topic": terms.topic, "group": terms.group, "consumer": terms.name}
        return {**who, "epoch": epoch}

    @contextmanager
    def _translating_fences(self, epoch: int) -> Iterator[None]:
        try:
            yield
        except Expired:
            self._rejoin(epoch)
            raise
        except Fenced as error:
            raise self._translate_fence(epoch, error) from None

    def _extend_lease(self, asked_s: float) -> None:
        self.lease_until_s = max(self.lease_until_s, asked_s + self._terms.dead_s)

    def _translate_fence(self, epoch: int, error: Fenced) -> PolybusError:
        """A late answer to what we were before is not about what we are now."""
        with self._lock:
            return error if epoch == self.epoch else Expired(str(error))

    def _rejoin(self, epoch: int) -> None:
        with self._lock:
            if epoch != self.epoch or self.is_leaving:
                return
            terms = self._terms
            log.warning("%s of %s/%s was taken for dead", terms.name, terms.topic, terms.group)
            self._on_lost()
            self.retry(self._join_again)

    def _join_again(self) -> None:
        if self.is_leaving:
            raise ConsumerClosing
        self._join()

    def _join(self) -> None:
        asked_s = self._clock()
        who = self._identity_fields(0)
        del who["epoch"]
        answer = self._bus.act("group.join", **who, **self._terms.join_fields)
        self.epoch = int(answer["epoch"])
        self.lease_until_s = asked_s + self._terms.dead_s

    def _create_topic(self) -> None:
        try:
            self._bus.act("topic.create", topic=self._terms.topic)
        except AlreadyExists:
            pass
