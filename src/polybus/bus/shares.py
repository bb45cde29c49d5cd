"""Shares: one caller must not fill a table that is bounded in total.

Each table of the bus has a bound on its entries (connections, calls, groups, …). A caller
gets at most its *share* of them, and the last entries, the *reserve*, are for admins:

    a caller below its share, outside the reserve     gets an entry
    an admin, as long as the table has room           gets an entry
    any other                                         is refused with `LimitReached`

So a caller that takes all it can get leaves room for the next one, and all callers together
leave room for an admin. An *account* is the name of an identity. All anonymous callers
share one.

`[limits] user_share` and `admin_reserve` are fractions of each table's bound. A few tables
have a setting of their own for the most that one user may take, which holds for admins, too.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from polybus.errors import LimitReached

if TYPE_CHECKING:
    from polybus.model.identity import Identity
    from polybus.model.limits import Limits

IsAdmin = Callable[["Identity"], bool]


class ShareTable:
    """The entries of one table, by account. Thread-safe.

    `limit` is the setting that bounds the table. `is_admin` is asked only if a caller would be
    refused otherwise. `on_refused` gets the reason of each refusal, for the counters.
    """

    def __init__(
        self,
        limit: str,
        total: int,
        share: int,
        reserve: int,
        is_admin: IsAdmin,
        on_refused: Callable[[str], None] = lambda reason: None,
        *,
        user_limit: str = "",
    ) -> None:
        """`user_limit` is the setting of the share, if it has one; then admins keep to it, too."""
        self.limit = limit
        self.total = total
        self.share = share
        self.reserve = reserve
        self._share_reason = user_limit or f"{limit}_share"
        self._user_limit = user_limit
        self._is_admin = is_admin
        self._on_refused = on_refused
        self._held: dict[str, int] = {}
        self._used = 0
        self._lock = Lock()

    @property
    def used(self) -> int:
        return self._used

    def held(self, account: str) -> int:
        return self._held.get(account, 0)

    def take(self, identity: Identity, amount: int = 1, *, may_use_reserve: bool = False) -> None:
        """Add entries of a caller. Raises `LimitReached`, with nothing added."""
        total = self.total if may_use_reserve else self.total - self.reserve
        reason = self._try(identity.account_name, amount, self.share, total)
        if reason is None:
            return
        # Not under the lock: the check may have to ask another thread.
        if self._is_admin(identity):
            share = self.share if self._user_limit else self.total
            reason = self._try(identity.account_name, amount, share, self.total)
            if reason is None:
                return
        self._refuse(identity.account_name, reason)

    def check_room(self, identity: Identity) -> None:
        """Raise `LimitReached` as `take` would; adds nothing."""
        self.take(identity)
        self.release(identity.account_name)

    def restore(self, account: str, amount: int = 1) -> None:
        """Add entries that exist already, such as those of a store; they are never refused."""
        with self._lock:
            self._add(account, amount)

    def release(self, account: str, amount: int = 1) -> None:
        """Remove entries. Raises `ValueError` if the account has fewer."""
        with self._lock:
            left = self._held.get(account, 0) - amount
            if left < 0:
                raise ValueError(f"{account} has fewer than {amount} entries of {self.limit}")
            if left:
                self._held[account] = left
            else:
                self._held.pop(account, None)
            self._used -= amount

    def _try(self, account: str, amount: int, share: int, total: int) -> str | None:
        """Add entries within these bounds. Returns the reason if there is no room."""
        with self._lock:
            if self._used + amount > self.total:
                return self.limit
            if self._held.get(account, 0) + amount > share:
                return self._share_reason
            if self._used + amount > total:
                return f"{self.limit}_reserve"
            self._add(account, amount)
            return None

    def _add(self, account: str, amount: int) -> None:
        self._held[account] = self._held.get(account, 0) + amount
        self._used += amount

    def _refuse(self, account: str, reason: str) -> None:
        self._on_refused(reason)
        limit = self.limit
        if reason == self.limit:
            text = f"{limit} ({self.total}) is reached"
        elif reason == self._share_reason:
            text = f"{account} has its share of {limit} ({self.share} of {self.total})"
            limit = self._user_limit or limit
        else:
            text = f"the last {self.reserve} of {limit} ({self.total}) are for admins"
        raise LimitReached(limit, f"{text}; retry later")


def unshared_table(limit: str, total: int) -> ShareTable:
    """Return a table of a bus with one user, who may fill it."""
    return ShareTable(limit, total, total, 0, lambda identity: True)


class Shares:
    """Makes the tables of a bus, with the shares that its settings define."""

    def __init__(self, limits: Limits, is_admin: IsAdmin) -> None:
        self._user_share = limits.user_share
        self._admin_reserve = limits.admin_reserve
        self._is_admin = is_admin

    def new_table(
        self,
        limit: str,
        total: int,
        on_refused: Callable[[str], None] = lambda reason: None,
        *,
        user_limit: tuple[str, int] | None = None,
        is_admin: IsAdmin | None = None,
    ) -> ShareTable:
        """Return an empty table; `user_limit` is its own setting for the share of one user.

        A table for other threads than the loop's needs an `is_admin` and an `on_refused` that
        they may call.
        """
        name, share = user_limit or ("", max(1, int(total * self._user_share)))
        # At least one entry, unless the table has only one.
        reserve = min(total // 2, max(1, int(total * self._admin_reserve)))
        if not self._admin_reserve:
            reserve = 0
        return ShareTable(
            limit,
            total,
            share,
            reserve,
            is_admin or self._is_admin,
            on_refused,
            user_limit=name,
        )
