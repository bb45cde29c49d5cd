"""Detached readers: subscriptions whose connection has closed, by account, oldest first.

A one-shot client subscribes, exits, and comes back with the subscriber id. In between its
subscription is detached: it gets messages, which its user's quota_bytes and
quota_subscriptions are charged for. The next Get with the id, from any connection of the
user, attaches it to that connection.

A detached reader must not take room from the user's attached ones. Where a quota of the user
has no room, the user's oldest detached reader is evicted, then the next one, until there is
room. A reader on which a Get waits is in use and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from polybus.bus.quotas import BYTES

if TYPE_CHECKING:
    from polybus.bus.quotas import Key, Quotas
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.model.identity import Identity


class DetachedReaders:
    """The table. `end_reader` ends a reader that is evicted, which removes it here."""

    def __init__(self, quotas: Quotas, max_readers: int) -> None:
        self._quotas = quotas
        self._max_readers = max_readers
        # Oldest first, by their last use.
        self._by_account: dict[Key, dict[PullReader, None]] = {}
        self._count = 0
        self.evicted = 0
        self.end_reader: Callable[[PullReader], None] = lambda reader: None

    def __len__(self) -> int:
        return self._count

    def add(self, reader: PullReader) -> None:
        """Add a reader; one of the user with the most is evicted if the table is full."""
        self._by_account.setdefault(reader.identity.account, {})[reader] = None
        self._count += 1
        if self._count > self._max_readers:
            # Not the oldest of all: one user must not push out those of the others.
            most = max(self._by_account, key=lambda account: len(self._by_account[account]))
            self.evict_oldest(most)

    def discard(self, reader: PullReader) -> None:
        account = reader.identity.account
        own = self._by_account.get(account, {})
        if reader in own:
            del own[reader]
            self._count -= 1
            if not own:
                del self._by_account[account]

    def can_evict(self, reader: PullReader) -> bool:
        return not reader.is_owned and not reader.waiters

    def evictable_bytes(self, account: Key) -> int:
        """Return the unread bytes that evicting all of the account's readers would free."""
        own = self._by_account.get(account, {})
        return sum(reader.held_bytes for reader in own if self.can_evict(reader))

    def evict(self, reader: PullReader) -> None:
        self.evicted += 1
        self.end_reader(reader)

    def evict_oldest(self, account: Key) -> PullReader | None:
        """Evict the account's oldest reader. Returns it, or None if there is none to evict."""
        own = self._by_account.get(account, {})
        reader = next((reader for reader in own if self.can_evict(reader)), None)
        if reader is not None:
            self.evict(reader)
        return reader

    def make_room(self, identity: Identity, size: int) -> None:
        """Evict until the user's quota_bytes has room for `size`, or no reader is left."""
        while size > self._quotas.room(identity, BYTES):
            if self.evict_oldest(identity.account) is None:
                return

    def find_unused_since(self, deadline_s: float) -> Iterator[PullReader]:
        """Yield the readers that were last used at `deadline_s` or before."""
        for own in self._by_account.values():
            for reader in own:
                if reader.used_s > deadline_s:
                    break  # the later ones were used later
                yield reader
