"""Named limits with their defaults, and the reason for each.

Every queue and table of the bus is bounded by one of these. Each is a setting under
`[limits]` or in the section of its dialect. A limit is checked before memory is allocated.
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
    # A frame of which only a part has arrived for this long is logged: its client probably
    # wrote a wrong length, and waits for an answer.
    unfinished_frame_s: float = 5.0
    # The part of each bounded table that one user may take (`bus.shares`): much, because many
    # hosts have one user, and not all, because others must still be served.
    user_share: float = 0.5
    # The part of each bounded table that only admins may take, to end what fills the rest.
    admin_reserve: float = 0.0625


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
    """Limits of the native port (`[native]`)."""

    # One batch is one atomic produce, held in memory until it is on disk.
    max_batch_bytes: int = 128 * MIB
    # Requests and results of actions are names and numbers; a list of many topics fits.
    max_action_bytes: int = 4 * MIB
    # In-flight batches of a stream: enough to fill the time of a commit, and few enough
    # that a client learns of an error soon.
    max_batches_in_flight: int = 64
    # The same in bytes: one stream must not take all of max_uncommitted_bytes. A larger
    # batch is admitted alone.
    max_bytes_in_flight: int = 32 * MIB
    # In-flight bytes of all streams together.
    max_uncommitted_bytes: int = 256 * MIB
    # Concurrent streams, reads and actions: each has a thread of about 100 kB.
    max_calls: int = 4096
    # Streams of one connection: gRPC holds some 10 kB for each. Clients queue calls beyond it.
    max_streams: int = 40
    # Calls of one connection that the client resets within a second: a client resets a read that
    # it does not need to its end. Beyond it the connection is cut, because each costs a thread.
    max_resets_per_s: int = 1000
    # Bytes of compressed batches of one user, unpacked and not yet on disk: a few kB can unpack
    # to a thousand times as much. A larger batch must be sent without compression.
    max_user_unpacked_bytes: int = 32 * MIB
    # The same of all users together.
    max_unpacked_bytes: int = 64 * MIB
    # Each connection takes three descriptors, five with TLS, even if it is idle.
    max_connections: int = 2048
    # Each wait blocks a thread.
    max_waits: int = 1024
    # Bounds how long a client that has vanished holds its thread.
    max_wait_s: float = 30.0
    # Shards of a topic that the first produce creates.
    default_shards: int = 16
    # Consumer groups of all topics: a group of 16 shards takes some 30 kB of memory.
    max_groups: int = 1024
    # Consumer groups of one user: one user must not take all of max_groups.
    max_user_groups: int = 512
    # Producers with an owner: two records each, some 300 bytes of disk.
    max_producers: int = 262_144
    # Open stages: some 500 bytes of memory each, and any number of staged bytes on disk.
    max_stages: int = 65_536
    # Messages that are not due yet, of all topics: on disk, some 200 bytes each besides their
    # content. The bus reads them once at its start, some seconds per million batches.
    max_delayed: int = 16_000_000
    # The same of one topic.
    max_topic_delayed: int = 8_000_000
    # Consumers of one group: twice the largest number of shards of a topic.
    max_members: int = 1024
    # Most rows of one fetch: enough to make the cost of the call negligible...
    max_fetch_rows: int = 65_536
    # ...and bytes: few enough that many consumers can fetch at once.
    max_fetch_bytes: int = 16 * MIB
