"""One subscription to an ephemeral topic: what it has not read, and who waits for more.

What is unread, and how it is taken in two steps, is in dialects/freud/server/unread_queue.pyx.


All subscriptions that pull, by their ids, until something ends them.

A reader belongs to its user and outlives its connection: who has the id goes on with it
from another one. It ends once, for one of these reasons:

    unsubscribed           its user said so
    deleted                it has read the notice that its topic is gone
    deletion_timeout       it has not read that for too long
    abandoned              no connection owns it, and nobody has used it for too long
    subscription_revoked   rules forbid it by now

What it has not read is then dropped, and counted under the reason; what is in a log stays
there. Whoever waits for a message of it is told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from polybus.bus.quotas import BYTES, SUBSCRIPTIONS
from polybus.dialects.freud.server.unread_queue import Unread

if TYPE_CHECKING:
    from polybus.bus.counters import Counters
    from polybus.bus.policy import Policy
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.server.ephemeral_topic import Tally
    from polybus.dialects.freud.server.topic_lifecycle import Incarnation, TopicLifecycle
    from polybus.dialects.freud.server.unread_queue import Range
    from polybus.model.identity import Identity


class PullReader(Unread):
    """`id` is the subscriber id; it works only for the uid that got it."""

    def __init__(
        self, reader_id: bytes, identity: Identity, incarnation: Incarnation | None
    ) -> None:
        self.id = reader_id
        self.identity = identity
        self.incarnation = incarnation
        self.used_s = 0.0  # when it was last used; of interest once it is not owned
        self._waking = False

    @property
    def is_behind(self) -> bool:
        """Is there more for it than it was given? Only for those that read a log (pulling.py)."""
        return False

    @property
    def topic_name(self) -> bytes:
        assert self.incarnation is not None
        return self.incarnation.name

    @property
    def has_waiters(self) -> bool:
        return bool(self.waiters)

    def wait(self, wake: Callable[[], None], *, polls: bool = False) -> None:
        """`wake` is called, once, when there is something to take or the reader is gone.

        One that only polls is called also when it has turned out that there is nothing.
        """
        self.waiters[wake] = polls

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        self.waiters.pop(wake, None)

    def wake(self) -> None:
        """Lets those who wait try, first come first served, while there is something to take."""
        if self._waking:
            return  # one of them could not take it, or ended this: the rest have their turn below
        self._waking = True
        try:
            while self.waiters and (self.ranges or self.gone):
                first = next(iter(self.waiters))
                del self.waiters[first]
                first()
        finally:
            self._waking = False

    def wake_polls(self) -> None:
        """There is nothing to take for those who only asked."""
        for one in [one for one, polls in self.waiters.items() if polls]:
            if self.waiters.pop(one, False):
                one()


ID_BYTES = 16


class PullReaders:
    """`by_id` is what the short path looks into, too."""

    def __init__(
        self,
        succession: TopicLifecycle,
        quotas: Quotas,
        counters: Counters,
        tally: Tally,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._succession = succession
        self._quotas = quotas
        self._counters = counters
        self._tally = tally
        self._timeout_s = timeout_s
        self._clock = clock
        self.by_id: dict[bytes, PullReader] = {}
        self._unowned: dict[PullReader, None] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, reader: PullReader) -> None:
        """Its subscription is charged already."""
        reader.account = self._quotas.account(reader.identity)
        self.by_id[reader.id] = reader

    def find(self, caller: Identity, reader_id: bytes) -> PullReader | None:
        """The subscription of this id, if it is the caller's."""
        reader = self.by_id.get(reader_id)
        if reader is None or reader.identity.account != caller.account:
            return None
        reader.used_s = self._clock()
        return reader

    def end(self, reader: PullReader, reason: str) -> None:
        self._quotas.release(reader.identity, BYTES, reader.held_bytes)
        self._quotas.release(reader.identity, SUBSCRIPTIONS, 1)
        lost = reader.end()
        del self.by_id[reader.id]
        self._unowned.pop(reader, None)
        if reader.incarnation is not None:
            self._counters.count("dropped", reason, lost)
            self._succession.on_reader_ended(reader, reader.incarnation)
        reader.wake()

    # --- what connections do

    def confirm(self, reader: PullReader, taken: Range) -> None:
        """What was taken is in the reader's socket."""
        if reader.gone:
            return
        reader.confirm(taken)
        self._tally.delivered += len(taken)
        self._tally.delivered_bytes += taken.size
        self._quotas.release(reader.identity, BYTES, _charged(taken))
        if taken.chunk.notice:
            self.end(reader, "deleted")

    def give_back(self, taken: Iterable[tuple[PullReader, Range]]) -> None:
        """Their connection ended before these reached its socket.

        All are back in their places before anybody who waits is served.
        """
        readers: dict[PullReader, None] = {}
        for reader, one in taken:
            if reader.gone:
                self._counters.count("dropped", "disconnected", _messages(one))
            else:
                reader.give_back(one)
                readers[reader] = None
        for reader in readers:
            reader.wake()

    def release_readers(self, readers: Iterable[PullReader]) -> None:
        """Their connection has closed; another may go on with them for a while."""
        for reader in readers:
            if not reader.gone:
                reader.is_owned = False
                reader.used_s = self._clock()
                self._unowned[reader] = None

    # --- what the rest of the bus does

    def end_denied(self, policy: Policy) -> int:
        """Ends those that the policy allows no longer; says how many those were."""
        lost = [
            reader
            for reader in self.by_id.values()
            if not policy.allows(reader.identity, "subscribe", reader.topic_name)
        ]
        for reader in lost:
            if not reader.gone:  # whoever is woken by one of these may end another itself
                self.end(reader, "subscription_revoked")
        return len(lost)

    def tick(self, now_s: float) -> None:
        for reader in [r for r in self._unowned if r.has_waiters]:
            reader.used_s = now_s
        for reader in [r for r in self._unowned if now_s - r.used_s >= self._timeout_s]:
            self.end(reader, "abandoned")


def new_id() -> bytes:
    return os.urandom(ID_BYTES)


def _messages(taken: Range) -> int:
    return 0 if taken.chunk.notice else len(taken)


def _charged(taken: Range) -> int:
    return 0 if taken.chunk.notice else taken.size
