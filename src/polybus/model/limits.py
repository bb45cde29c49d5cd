"""Named limits with their defaults, and the reason for each.

Every queue and table of the bus is bounded by one of these; each is a setting
under `[limits]` or its dialect's section. A limit is checked before anything
is allocated for what it bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KIB = 1024
MIB = 1024 * KIB
# The largest message of any dialect: each must be able to deliver messages of the others.
LARGEST_MESSAGE_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all dialects (`[limits]`)."""

    # One descriptor each; a flood of connects must not starve the connected clients.
    max_connections: int = 10_000
    # A topic entry is some 200 bytes: at the limit the table holds about 20 MB.
    max_topics: int = 100_000
    # One client must not fill the topic table.
    max_subscriptions_per_connection: int = 10_000
    # Most bytes held for one reader; the bus disconnects a reader beyond it.
    outbox_max_bytes: int = 64 * MIB
    # Beyond this mark the publishers of a reader block: enough for a burst of a few
    # milliseconds at full rate, and small enough that held messages are recent.
    outbox_high_water_bytes: int = 4 * MIB
    # In-flight bytes of one connection: enough for several commits, so that the next
    # batch arrives while the last one is synced.
    max_uncommitted_bytes: int = 8 * MIB
    # A reader over its high-water mark that reads slower than this...
    slow_consumer_min_bytes_per_s: int = 64 * KIB
    # ...for this long is disconnected: a stuck process must not block its publishers.
    slow_consumer_timeout_s: float = 5.0


# User (name or uid) → quota → amount, where it differs from the defaults.
UserQuotas = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Quotas of one user (`[quotas]`); all anonymous callers are one user."""

    # Unread messages of the user's subscriptions: enough for bursts.
    quota_bytes: int = 256 * MIB
    # An idle subscription takes about a kilobyte.
    quota_subscriptions: int = 4096
    # One user must not fill the topic table.
    quota_topics: int = 4096
    # One descriptor each: a user who leaks connections must not exhaust them for all.
    quota_connections: int = 1024
    # `[quotas.users.alice]` with any of the keys above.
    users: UserQuotas = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NativeLimits:
    """Bounds of the native port (`[native]`)."""

    # One batch is one atomic produce, held in memory whole until it is on disk.
    max_batch_bytes: int = 128 * MIB
    # Requests and answers of actions are names and numbers; a list of many topics still fits.
    max_action_bytes: int = 4 * MIB
    # A stream's batches that are on their way to the disk: enough to fill the time of a
    # commit, and few enough that a client learns of trouble soon.
    max_batches_in_flight: int = 64
    # The same in bytes, so that one stream cannot take all of max_uncommitted_bytes; a
    # larger batch travels alone.
    max_bytes_in_flight: int = 32 * MIB
    # The same over all streams, in bytes: what the bus holds for everybody at most.
    max_uncommitted_bytes: int = 256 * MIB
    # Streams, reads and actions under way at once: each has a thread, of some 100 kB.
    max_calls: int = 4096
    # Each client has one, and it takes a descriptor of the process whether it is used or not.
    max_connections: int = 4096
    # Each waits on a thread of its own.
    max_waits: int = 1024
    # So that a client that has vanished without a word frees its place soon.
    max_wait_s: float = 30.0
    # Shards of a topic that is made by producing to it.
    default_shards: int = 16
    # Consumer groups of all topics: a group of 16 shards takes some 30 kB of memory.
    max_groups: int = 1024
    # Of one user, so that nobody can take them all.
    max_user_groups: int = 512
    # Consumers of one group: as many shards as a topic has at most can have one each, twice over.
    max_members: int = 1024
    # What one fetch brings at most: enough that a call costs nothing beside it...
    max_fetch_rows: int = 65_536
    # ...and little enough that many consumers can fetch at once.
    max_fetch_bytes: int = 16 * MIB
