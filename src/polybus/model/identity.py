"""Who a peer is, as far as the kernel of the host can vouch for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller. `uid` is None when nobody vouches for it: then it is anonymous."""

    uid: int | None = None
    gid: int | None = None
    pid: int | None = None

    @property
    def name(self) -> str:
        return "anonymous" if self.uid is None else f"uid:{self.uid}"


ANONYMOUS = Identity()
