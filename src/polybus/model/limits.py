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


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that hold for all dialects (`[limits]`)."""

    # One descriptor each; beyond this a flood of connects would starve those who are served.
    max_connections: int = 10_000
    # A topic entry is some 200 bytes: at the limit the table holds about 20 MB.
    max_topics: int = 100_000
    # One client cannot take the whole topic table for itself.
    max_subscriptions_per_connection: int = 10_000
    # The most the bus ever holds for one reader: one over it is cut at once.
    outbox_max_bytes: int = 64 * MIB
    # Over this mark, those who feed a reader wait: enough for a burst of a few
    # milliseconds at full rate, and small enough that what is held is recent.
    outbox_high_water_bytes: int = 4 * MIB
    # What one connection may have on its way to the disk: enough for several commits,
    # so that its next batch travels while the last one is synced.
    max_uncommitted_bytes: int = 8 * MIB
    # A reader over its mark that takes less than this...
    slow_consumer_min_bytes_per_s: int = 64 * KIB
    # ...over this long is cut, so that one stuck process cannot hold up its publishers.
    slow_consumer_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RqueueLimits:
    """Bounds of the rqueue dialect (`[rqueue]`)."""

    # The seed's cap: a frame stays near one Ethernet packet. Larger messages travel as PARTs.
    max_payload: int = 2048
    # A publisher that dies between PARTs must not pin their memory.
    part_timeout_s: float = 30.0
    # The largest message that PARTs may add up to.
    max_message_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True)
class FreudLimits:
    """Bounds of the Freud dialect (`[freud]`)."""

    # A request's payload: room for large messages, and the most that one connection can
    # make the bus hold before a request is whole.
    max_frame_bytes: int = 16 * MIB
    # How long a dead process may pin what it has not read, and a deleted topic its name.
    subscriber_timeout_s: float = 30.0
    # Unread bytes are charged to a quota, but empty messages weigh nothing there: at some
    # 16 bytes each this many cost 64 MiB.
    max_unread_messages: int = 4_194_304


@dataclass(frozen=True, slots=True)
class GsbLimits:
    """Bounds of the GSB dialect (`[gsb]`)."""

    # What the bus takes in one packet: room for large values, and the most that one
    # connection can make it hold before a packet is whole.
    max_packet_bytes: int = 16 * MIB
    # A call without an answer ends after this long, unless its caller's hello says otherwise.
    deadline_ms: int = 60_000
    # A caller that is owed this much is full: what it streams waits at the service...
    outbox_full_bytes: int = 1 * MIB
    # ...until so little is left. Far apart, so that many items travel between two stops.
    outbox_free_bytes: int = 256 * KIB
    # A stream's first PARTIALs need no credit: most streams are short, and need none at all.
    free_partials: int = 64
    # The same in bytes, so that it is not 64 times the largest packet.
    free_bytes: int = 1 * MIB
    # A peer that says nothing for this long is asked whether it is there...
    ping_idle_s: float = 30.0
    # ...and dropped after this long: routers forget connections that are silent for minutes.
    ping_timeout_s: float = 120.0
    # Open calls of one connection, some 500 bytes each: a caller that forgets to read its
    # answers must not fill the table.
    max_open_calls: int = 65_536
    # Names that one connection registers.
    max_services: int = 1024
    # A peer that keeps others waiting and takes next to nothing for this long is cut. Longer
    # than for readers of topics: a slow caller slows down only those who share its service.
    stuck_timeout_s: float = 30.0
    # Every call becomes a message of the durable topic gsb.calls.
    audit: bool = False


# User (a name or a number) → quota → how much: what differs from the quotas of all.
UserQuotas = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """What one user may take of the bus (`[quotas]`); all anonymous callers are one."""

    # Unread messages held for the user's subscriptions: bursts, and not a second memory.
    quota_bytes: int = 256 * MIB
    # A subscription costs about a kilobyte even if nothing comes.
    quota_subscriptions: int = 4096
    # So that no user can fill the table of names for all others.
    quota_topics: int = 4096
    # One descriptor each: a user who leaks connections must not use up everybody's.
    quota_connections: int = 1024
    # `[quotas.users.alice]`, each with some of the keys above.
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


@dataclass(frozen=True, slots=True)
class PirateLimits:
    """Bounds of the pirate dialect (`[pirate]`)."""

    # Each has a record of its epochs and one of its counter, for ever: some 200 bytes of disk.
    max_clients: int = 262_144
    # Some 400 bytes of memory each, and each may hold back a topic's messages.
    max_subscriptions: int = 131_072
    # Of one user, so that nobody can take them all.
    max_user_subscriptions: int = 65_536
    # Of one client, while something of it is under way: a Lazy Pirate has one or two.
    max_client_requests: int = 64
    # Messages on their way to the disk, of all clients: a few of the largest size.
    max_uncommitted_bytes: int = 256 * MIB
    # A subscriber that is not heard of for so long is dropped, and holds nothing back; 0: never.
    subscriber_ttl_s: float = 0.0
    # What one connection may have sent of a message that is not whole yet: the largest
    # message in small frames, with its envelope.
    max_unfinished_bytes: int = 72 * MIB
    # The same of all connections, and of all answers that their clients have not taken.
    max_unread_bytes: int = 512 * MIB
