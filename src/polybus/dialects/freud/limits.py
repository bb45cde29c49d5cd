"""Limits of the Freud dialect, the section `[freud]` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from polybus.model.limits import MIB


@dataclass(frozen=True, slots=True)
class FreudLimits:
    """Limits of the Freud dialect (`[freud]`)."""

    # Largest payload of a request: the most that one connection can make the bus hold
    # before a request is complete.
    max_frame_bytes: int = 16 * MIB
    # How long a deleted topic waits until its subscribers have read the notice.
    subscriber_timeout_s: float = 30.0
    # Unread bytes are charged to a quota, but empty messages are free there: at about
    # 16 bytes each, this many cost 64 MiB.
    max_unread_messages: int = 4_194_304
    # How long a subscription stays after its connection has closed, for a client that comes
    # back with its id.
    detached_subscription_s: float = 86_400.0
    # Of all users together: with quota_bytes, it bounds what clients that are gone can pin.
    max_detached_subscriptions: int = 65_536


# The option of a listener, `unix:/path?length=with-header`: which bytes the length of a request
# counts. The second framing is that of an older client (docs/spec/freud.md).
LENGTH = "length"
PAYLOAD = "payload"
WITH_HEADER = "with-header"
LENGTHS = (PAYLOAD, WITH_HEADER)

# (lowest, highest) of each key. A key without a row must be at least 1 (a float: above 0).
BOUNDS: dict[str, tuple[float, float]] = {
    # A message of one byte under the longest name must fit, and no reader accepts one over 64 MiB.
    "max_frame_bytes": (260, 64 * MIB),
}
