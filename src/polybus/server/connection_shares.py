"""The share of a user in the places for connections.

`max_connections` bounds the connections of all stream and pirate listeners. Each user gets a
share of them. The reserve is for admins and for Freud's listeners: these are Unix sockets,
by which local programs must reach the bus while its ports are flooded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polybus.errors import LimitReached

if TYPE_CHECKING:
    from polybus.bus.quotas import ConnectionQuota
    from polybus.bus.shares import ShareTable
    from polybus.model.identity import Identity
    from polybus.transports.stream_listener import ConnectionLimit


class ConnectionShares:
    """The share of each user, as a `CallerLimit` of listeners; `quota` is a second limit."""

    def __init__(self, table: ShareTable, quota: ConnectionQuota | None, log: Any) -> None:
        self._table = table
        self._quota = quota
        self._log = log

    def acquire(self, identity: Identity) -> bool:
        try:
            self._table.take(identity, may_use_reserve=self._quota is not None)
        except LimitReached as error:
            self._log.warning("connection refused", user=identity.account_name, reason=str(error))
            return False
        if self._quota is not None and not self._quota.acquire(identity):
            self._table.release(identity.account_name)
            return False
        return True

    def release(self, identity: Identity) -> None:
        self._table.release(identity.account_name)
        if self._quota is not None:
            self._quota.release(identity)


class ConnectionPlaces:
    """The places of connections that another library accepts: a `ConnectionCount`."""

    def __init__(self, limit: ConnectionLimit, shares: ConnectionShares) -> None:
        self._limit = limit
        self._shares = shares

    def enter(self, peer: str, identity: Identity) -> bool:
        if not self._limit.enter(peer):
            return False
        if not self._shares.acquire(identity):
            self._limit.leave()
            return False
        return True

    def leave(self, identity: Identity) -> None:
        self._limit.leave()
        self._shares.release(identity)
