"""The tables of the native port that are bounded in total, with a share per caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from polybus.bus.shares import Shares
from polybus.model.limits import Limits

if TYPE_CHECKING:
    from polybus.bus.shares import IsAdmin, ShareTable
    from polybus.model.limits import NativeLimits

# Positions of all waits together, about 200 bytes each: at most about 200 MB.
MAX_TOTAL_POSITIONS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PortShares:
    """One table per bound. Any thread may use them."""

    calls: ShareTable
    waits: ShareTable
    wait_positions: ShareTable
    producers: ShareTable
    stages: ShareTable
    groups: ShareTable
    delayed: ShareTable

    @classmethod
    def open(
        cls,
        shares: Shares,
        limits: NativeLimits,
        is_admin: IsAdmin,
        on_refused: Callable[[str], None],
    ) -> Self:
        """Return empty tables; any thread must be able to call `is_admin` and `on_refused`."""

        def table(limit: str, total: int, user_limit: tuple[str, int] | None = None) -> ShareTable:
            return shares.new_table(
                limit, total, on_refused, user_limit=user_limit, is_admin=is_admin
            )

        return cls(
            calls=table("max_calls", limits.max_calls),
            waits=table("max_waits", limits.max_waits),
            wait_positions=table("wait_positions", MAX_TOTAL_POSITIONS),
            producers=table("max_producers", limits.max_producers),
            stages=table("max_stages", limits.max_stages),
            groups=table(
                "max_groups", limits.max_groups, ("max_user_groups", limits.max_user_groups)
            ),
            delayed=table("max_delayed", limits.max_delayed),
        )

    @classmethod
    def of_one_user(cls, limits: NativeLimits) -> Self:
        """Return the tables of a bus inside a process: its only user is an admin."""
        shares = Shares(Limits(), lambda identity: True)
        return cls.open(shares, limits, lambda identity: True, lambda reason: None)
