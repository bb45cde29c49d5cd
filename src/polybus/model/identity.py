"""The identity of a caller, as far as the host or a key vouches for it.

The host's kernel vouches for local callers (uid, groups, process), a verified key for
others. A key takes precedence over the uid: a caller that presents one is that key,
wherever it connects from. A caller without either is anonymous. All anonymous callers are
one identity, and none of them owns anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller at the moment it connected."""

    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    # Supplementary groups; None if unknown (over TCP the kernel reports only the uid).
    groups: frozenset[int] | None = None
    # The unit it runs in, else its executable; empty if unknown.
    service: str = ""
    # A CURVE key, the name in a TLS certificate, or the name of a token.
    key: str = ""

    @property
    def is_anonymous(self) -> bool:
        return self.uid is None and not self.key

    @property
    def account(self) -> int | str | None:
        """Return the account that quotas charge: the key, else the uid, else the shared one."""
        return self.key or self.uid

    @property
    def name(self) -> str:
        if self.key:
            return f"key:{self.key}"
        return "anonymous" if self.uid is None else f"uid:{self.uid}"

    def owns(self, creator: Identity | None) -> bool:
        """Return whether both are the same owner: equal keys, or equal uid and service."""
        if creator is None or self.is_anonymous or self.key != creator.key:
            return False
        return bool(self.key) or (self.uid, self.service) == (creator.uid, creator.service)


ANONYMOUS = Identity()
