"""Quotas per user: each charge is released exactly once.

An *account* is a uid (or a key, see `model.identity`); all anonymous callers
share one. A charge that would go over the account's quota is refused whole, and
the log names account and quota. Releasing more than was charged is an error of the
caller: a wrong count would stay wrong forever.

An account with nothing charged takes no memory, so the table is as large as the
number of users with charges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polybus.kernel.quota_account import MAX_AMOUNT, QuotaAccount
from polybus.model.limits import QuotaLimits

if TYPE_CHECKING:
    from polybus.bus.broker import Logger
    from polybus.bus.counters import Counters
    from polybus.model.identity import Identity

BYTES = "quota_bytes"
SUBSCRIPTIONS = "quota_subscriptions"
TOPICS = "quota_topics"
CONNECTIONS = "quota_connections"
QUOTAS = (BYTES, SUBSCRIPTIONS, TOPICS, CONNECTIONS)

QUOTA_INDEX = {quota: place for place, quota in enumerate(QUOTAS)}  # in the kernel's row

Key = int | str | None


class Quotas:
    """The accounts. `describe` returns the name of a caller for the log."""

    def __init__(
        self,
        limits: QuotaLimits,
        counters: Counters,
        log: Logger,
        describe: Callable[[Identity], str] = lambda identity: identity.name,
    ) -> None:
        self._counters = counters
        self._log = log
        self.describe = describe
        self._accounts: dict[Key, QuotaAccount] = {}
        self.configure(limits, {})

    def configure(self, limits: QuotaLimits, by_uid: Mapping[int, Mapping[str, int]]) -> None:
        """Set the quotas; `by_uid` overrides some of them for a user.

        An account over a lowered quota keeps its charges and gets no more.
        """
        self._defaults: dict[str, int] = {quota: getattr(limits, quota) for quota in QUOTAS}
        self._own = {(uid, quota): n for uid, its in by_uid.items() for quota, n in its.items()}
        for account in self._accounts.values():
            self._limit(account)

    def charge(
        self, identity: Identity, quota: str, amount: int = 1, *, trial: bool = False
    ) -> bool:
        """Charge an account. Returns False, with nothing charged, if it would exceed the quota.

        With `trial` the refusal is not logged: the caller will retry with less.
        """
        account = self.account(identity)
        charged = account.charge(QUOTA_INDEX[quota], amount)
        if not charged and not trial:
            self.refuse(identity, quota, amount)
        self._drop_if_empty(account)
        return charged

    def release(self, identity: Identity, quota: str, amount: int = 1) -> None:
        account = self.account(identity)
        try:
            account.release(QUOTA_INDEX[quota], amount)
        finally:
            self._drop_if_empty(account)

    def account(self, identity: Identity) -> QuotaAccount:
        """Return the row of a caller: the same object while something is charged to it."""
        account = self._accounts.get(identity.account)
        if account is None:
            account = self._accounts[identity.account] = QuotaAccount(identity.account)
            self._limit(account)
        return account

    def used(self, key: Key, quota: str) -> int:
        account = self._accounts.get(key)
        return 0 if account is None else account.held(QUOTA_INDEX[quota])

    def limit(self, key: Key, quota: str) -> int:
        if isinstance(key, int) and (own := self._own.get((key, quota))) is not None:
            return own
        return self._defaults[quota]

    def room(self, identity: Identity, quota: str) -> int:
        """Return the unused part of a quota; negative after the quota was lowered below it."""
        return self.limit(identity.account, quota) - self.used(identity.account, quota)

    def accounts(self) -> list[dict[str, Any]]:
        """Return (account, quota, used, limit) of every account, for display."""
        return [
            {"account": key, "quota": quota, "used": n, "limit": self.limit(key, quota)}
            for key, account in self._accounts.items()
            for quota, place in QUOTA_INDEX.items()
            if (n := account.held(place))
        ]

    def refuse(self, identity: Identity, quota: str, amount: int) -> None:
        """Log a refused charge: account, quota and limit."""
        self._counters.count("refused", quota)
        self._log.warning(
            "quota reached",
            quota=quota,
            user=self.describe(identity),
            used=self.used(identity.account, quota),
            asked=amount,
            limit=self.limit(identity.account, quota),
        )

    def _limit(self, account: QuotaAccount) -> None:
        for quota, place in QUOTA_INDEX.items():
            account.set_limit(place, min(self.limit(account.key, quota), MAX_AMOUNT))

    def _drop_if_empty(self, account: QuotaAccount) -> None:
        if account.is_empty:
            self._accounts.pop(account.key, None)


class ConnectionQuota:
    """The quota of connections per user, as a `CallerLimit` of a listener."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def acquire(self, identity: Identity) -> bool:
        return self._quotas.charge(identity, CONNECTIONS)

    def release(self, identity: Identity) -> None:
        self._quotas.release(identity, CONNECTIONS)
