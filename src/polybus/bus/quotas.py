"""What each user may take of the bus, charged and released exactly.

An *account* is a uid (or a key, see `model.identity`); all anonymous callers
share one. A charge that would go over the account's quota is refused whole, and
the log says who hit which. Releasing what was never charged is a mistake of the
caller and an error: a count that is wrong once is wrong for ever.

An account with nothing charged takes no memory, so the table is as large as the
number of users who hold something now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polybus.model.limits import QuotaLimits

if TYPE_CHECKING:
    from polybus.bus.broker import Log
    from polybus.bus.stats import Counters
    from polybus.model.identity import Identity

BYTES = "quota_bytes"
SUBSCRIPTIONS = "quota_subscriptions"
TOPICS = "quota_topics"
CONNECTIONS = "quota_connections"
QUOTAS = (BYTES, SUBSCRIPTIONS, TOPICS, CONNECTIONS)

Account = int | str | None


class Quotas:
    """`describe` gives the name of a caller for the log."""

    def __init__(
        self,
        limits: QuotaLimits,
        counters: Counters,
        log: Log,
        describe: Callable[[Identity], str] = lambda identity: identity.name,
    ) -> None:
        self._counters = counters
        self._log = log
        self.describe = describe
        self._used: dict[tuple[Account, str], int] = {}
        self.configure(limits, {})

    def configure(self, limits: QuotaLimits, by_uid: Mapping[int, Mapping[str, int]]) -> None:
        """The quotas from now on; `by_uid` overrides some of them for a user.

        Whoever holds more than a new, lower quota keeps it, and gets no more.
        """
        self._defaults: dict[str, int] = {quota: getattr(limits, quota) for quota in QUOTAS}
        self._own = {(uid, quota): n for uid, its in by_uid.items() for quota, n in its.items()}

    def charge(
        self, identity: Identity, quota: str, amount: int = 1, *, trial: bool = False
    ) -> bool:
        """False, with nothing charged, if that would be over the quota.

        With `trial` nobody is told: whoever asks will ask again for less.
        """
        _check(amount)
        key = (identity.account, quota)
        used = self._used.get(key, 0) + amount
        if used > self.limit(identity.account, quota):
            if not trial:
                self.refuse(identity, quota, amount)
            return False
        if used:
            self._used[key] = used
        return True

    def release(self, identity: Identity, quota: str, amount: int = 1) -> None:
        _check(amount)
        key = (identity.account, quota)
        left = self._used.get(key, 0) - amount
        if left > 0:
            self._used[key] = left
        elif left == 0:
            self._used.pop(key, None)
        else:
            raise ValueError(f"{identity.name} releases {amount} of {quota}: more than it holds")

    def used(self, account: Account, quota: str) -> int:
        return self._used.get((account, quota), 0)

    def limit(self, account: Account, quota: str) -> int:
        if isinstance(account, int) and (own := self._own.get((account, quota))) is not None:
            return own
        return self._defaults[quota]

    def room(self, identity: Identity, quota: str) -> int:
        """How much more it may have; negative if it holds more than a new, lower quota."""
        return self.limit(identity.account, quota) - self.used(identity.account, quota)

    def accounts(self) -> list[dict[str, Any]]:
        """What everybody holds, for people: account, quota, used, limit."""
        return [
            {"account": account, "quota": quota, "used": n, "limit": self.limit(account, quota)}
            for (account, quota), n in self._used.items()
        ]

    def refuse(self, identity: Identity, quota: str, amount: int) -> None:
        """Somebody has asked for more than it may have: the log says who, and for what."""
        self._counters.count("refused", quota)
        self._log.warning(
            "quota reached",
            quota=quota,
            user=self.describe(identity),
            used=self.used(identity.account, quota),
            asked=amount,
            limit=self.limit(identity.account, quota),
        )


class Places:
    """The connections of each user, as a listener counts them (`transports.stream.Places`)."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def take(self, identity: Identity) -> bool:
        return self._quotas.charge(identity, CONNECTIONS)

    def give_back(self, identity: Identity) -> None:
        self._quotas.release(identity, CONNECTIONS)


def _check(amount: int) -> None:
    if amount < 0:
        raise ValueError(f"an amount is at least 0, not {amount}")
