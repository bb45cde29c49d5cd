"""Pull readers: subscriptions of Freud clients, in one table by subscriber id.

A reader belongs to its user and outlives its connection: any connection of the same user
that knows the id can continue with it (detached_readers.py). It ends once, for one of these
reasons:

    unsubscribed           its user unsubscribed, or an admin removed it
    deleted                it has read the notice that its topic was deleted
    deletion_timeout       it has not read that notice within subscriber_timeout_s
    abandoned              it is detached, and was not used for detached_subscription_s
    evicted                it is detached, and its user's quota had no room
    subscription_revoked   the rules deny it now

Its unread messages are then dropped and counted under the reason, except those of a
durable topic, which stay in the log. Gets that wait for it are answered Doesn't Exist.
Unread messages, and how they are taken and confirmed, are in unread_queue.pyx.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from polybus.bus.quotas import BYTES, SUBSCRIPTIONS
from polybus.dialects.freud.server.unread_queue import UnreadQueue

if TYPE_CHECKING:
    from polybus.bus.counters import Counters
    from polybus.bus.policy import Policy
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.server.detached_readers import DetachedReaders
    from polybus.dialects.freud.server.topic_lifecycle import Incarnation, TopicLifecycle
    from polybus.dialects.freud.server.unread_queue import Range
    from polybus.model.identity import Identity


class PullReader(UnreadQueue):
    """One subscription. `id` is the subscriber id; only the user that got it may use it."""

    def __init__(
        self, reader_id: bytes, identity: Identity, incarnation: Incarnation | None
    ) -> None:
        self.id = reader_id
        self.identity = identity
        self.incarnation = incarnation
        self.used_s = 0.0  # when it was last used or became detached
        self._waking = False

    @property
    def is_behind(self) -> bool:
        """True if its log has messages that were not fetched (durable_pull_reader.py)."""
        return False

    @property
    def topic_name(self) -> bytes:
        assert self.incarnation is not None
        return self.incarnation.name

    def wait(self, wake: Callable[[], None], *, polls: bool = False) -> None:
        """Call `wake` once, when there is a message to take or the reader has ended.

        A waiter that only `polls` is also called when there turns out to be no message.
        """
        self.waiters[wake] = polls

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        self.waiters.pop(wake, None)

    def wake(self) -> None:
        """Call waiters in order of arrival while there is a message to take."""
        if self._waking:
            return  # called by a waiter: the loop below continues with the next one
        self._waking = True
        try:
            while self.waiters and (self.ranges or self.gone):
                first = next(iter(self.waiters))
                del self.waiters[first]
                first()
        finally:
            self._waking = False

    def wake_polls(self) -> None:
        """Call the waiters that only poll: there is no message for them."""
        for wake in [wake for wake, polls in self.waiters.items() if polls]:
            if self.waiters.pop(wake, False):
                wake()


ID_BYTES = 16


class PullReaders:
    """All pull readers. PlainDelivery finds them in `by_id`."""

    def __init__(
        self,
        by_id: dict[bytes, PullReader],
        lifecycle: TopicLifecycle,
        quotas: Quotas,
        counters: Counters,
        detached: DetachedReaders,
        detached_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._lifecycle = lifecycle
        self._quotas = quotas
        self._counters = counters
        self._detached = detached
        self._detached_s = detached_s
        self._clock = clock
        self.by_id = by_id
        self.expired = 0  # detached readers that were not used in time
        self.on_evicted: Callable[[PullReader], None] = lambda reader: None
        detached.end_reader = self._evict

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, reader: PullReader) -> None:
        """Add a reader whose subscription was charged already."""
        reader.account = self._quotas.account(reader.identity)
        self.by_id[reader.id] = reader

    def end(self, reader: PullReader, reason: str) -> None:
        self._quotas.release(reader.identity, BYTES, reader.held_bytes)
        self._quotas.release(reader.identity, SUBSCRIPTIONS, 1)
        lost = reader.end()
        del self.by_id[reader.id]
        self._detached.discard(reader)
        if reader.incarnation is not None:
            self._counters.count("dropped", reason, lost)
            self._lifecycle.on_reader_ended(reader, reader.incarnation)
        reader.wake()

    # --- called by connections

    def give_back(self, taken: Iterable[tuple[PullReader, Range]]) -> None:
        """Return messages that did not reach the socket of a connection that ended."""
        readers: dict[PullReader, None] = {}
        for reader, messages in taken:
            if reader.gone:
                self._counters.count("dropped", "disconnected", _count_messages(messages))
            else:
                reader.give_back(messages)
                readers[reader] = None
        # Only now that all are back in their order may another connection take them.
        for reader in readers:
            reader.wake()

    def attach(self, reader: PullReader) -> None:
        """Make a connection the owner of a detached reader."""
        reader.is_owned = True
        self._detached.discard(reader)

    def detach(self, readers: Iterable[PullReader]) -> None:
        """Detach the readers of a connection that closed; another may continue with them."""
        for reader in readers:
            if not reader.gone:
                reader.is_owned = False
                self.renew(reader)

    def renew(self, reader: PullReader) -> None:
        """Record that a detached reader was used now."""
        if not reader.is_owned and not reader.gone:
            reader.used_s = self._clock()
            self._detached.discard(reader)
            self._detached.add(reader)

    # --- called by the bus

    def end_denied(self, policy: Policy) -> int:
        """End the readers that the policy denies. Returns how many were denied."""
        denied = [
            reader
            for reader in self.by_id.values()
            if not policy.allows(reader.identity, "subscribe", reader.topic_name)
        ]
        for reader in denied:
            if not reader.gone:  # a session woken by one of these may have ended another
                self.end(reader, "subscription_revoked")
        return len(denied)

    def tick(self, now_s: float) -> None:
        for reader in list(self._detached.find_unused_since(now_s - self._detached_s)):
            if reader.waiters:
                self.renew(reader)  # a Get that waits is use
            elif not reader.gone:  # the end of an earlier one may have ended it
                self.expired += 1
                self.end(reader, "abandoned")

    def _evict(self, reader: PullReader) -> None:
        self.on_evicted(reader)
        self.end(reader, "evicted")


def new_id() -> bytes:
    return os.urandom(ID_BYTES)


def _count_messages(taken: Range) -> int:
    return 0 if taken.chunk.notice else len(taken)
