"""Who a caller is, as far as somebody vouches for it.

The host's kernel vouches for local callers (uid, groups, process), a checked key
for others. A key wins over the uid: whoever shows one is that key, wherever it
calls from. Whom nobody vouches for is anonymous, and all anonymous callers are
one: none of them owns anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller, as it was when it connected."""

    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    # Supplementary groups. None: nobody told (over TCP the kernel gives the uid alone).
    groups: frozenset[int] | None = None
    # The unit it runs in, else its executable; empty if unknown.
    service: str = ""
    # A CURVE key, the name in a TLS certificate, or a token's.
    key: str = ""

    @property
    def is_anonymous(self) -> bool:
        return self.uid is None and not self.key

    @property
    def account(self) -> int | str | None:
        """Whom quotas charge: the key, else the uid; all anonymous callers share one."""
        return self.key or self.uid

    @property
    def name(self) -> str:
        if self.key:
            return f"key:{self.key}"
        return "anonymous" if self.uid is None else f"uid:{self.uid}"

    def owns(self, creator: Identity | None) -> bool:
        """Is this the caller that `creator` was: the same key, or the same uid and service?"""
        if creator is None or self.is_anonymous or self.key != creator.key:
            return False
        return bool(self.key) or (self.uid, self.service) == (creator.uid, creator.service)


ANONYMOUS = Identity()
