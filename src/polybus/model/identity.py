"""The identity of a caller, as far as the host or a key vouches for it.

The host's kernel vouches for local callers (uid, groups, process), a verified key for
others. A key takes precedence over the uid: a caller that presents one is that key,
wherever it connects from. A caller from another machine without a key is anonymous.

A caller of this machine whose user the kernel does not know, because it has hung up already,
is *in doubt*. It may be any user, so the policy applies every deny rule to it and no allow
rule (bus/policy.py). It is not anonymous: else any user could escape the rules that name it.

A caller may also be a node of the network: a bus on another machine that has proved its key.

Callers that are anonymous or in doubt share one account, and none of them owns anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NODE_ID = re.compile("0x[0-9a-f]{40}")


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
    # A local caller of an unknown user: no other field is set.
    is_in_doubt: bool = False
    # The id of a bus on another machine: no other field is set.
    node: str = ""

    @property
    def is_anonymous(self) -> bool:
        return self.uid is None and not self.key and not self.is_in_doubt and not self.node

    @property
    def account(self) -> int | str | None:
        """Return the account that quotas charge: the key, else the uid, else the shared one."""
        return self.key or self.node or self.uid

    @property
    def name(self) -> str:
        if self.key:
            return f"key:{self.key}"
        if self.is_in_doubt:
            return "in-doubt"
        if self.node:
            return f"node:{self.node}"
        return "anonymous" if self.uid is None else f"uid:{self.uid}"

    @property
    def account_name(self) -> str:
        """Return the name of the account for limits per user that are kept by name."""
        return ANONYMOUS.name if self.is_in_doubt else self.name

    def owns(self, creator: Identity | None) -> bool:
        """Return whether both are the same owner: equal keys, or equal uid and service."""
        if creator is None or self.account is None or self.key != creator.key:
            return False
        if self.node or creator.node:
            return False  # nodes create nothing
        return bool(self.key) or (self.uid, self.service) == (creator.uid, creator.service)


def is_node_id(text: str) -> bool:
    """Return whether a text has the form of the id of a bus of the network."""
    return _NODE_ID.fullmatch(text) is not None


ANONYMOUS = Identity()
IN_DOUBT = Identity(is_in_doubt=True)
