"""Every setting of the bus: its name, type, default, bounds and the reason for them.

A section is a frozen dataclass, a key is a field of it. All the rest (reading
TOML, `POLYBUS_*` variables, range checks, `polybus config show`) is derived
from here, so a new dialect adds its section with one line in `Settings`.

A number is at least 1 (a float: above 0) unless `BOUNDS` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polybus.model.access_rule import Rule
from polybus.model.limits import (
    KIB,
    MIB,
    FreudLimits,
    GsbLimits,
    Limits,
    NativeLimits,
    PirateLimits,
    QuotaLimits,
    RqueueLimits,
)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the process behaves (`[server]`)."""

    # What is still to be written gets this long after SIGTERM. The whole stop must
    # take at most 10 s, so that `systemctl restart` and tests never wait for a kill.
    drain_timeout_s: float = 5.0
    # Each admin connection may hold a line of 1 MiB: few people and scripts need more.
    max_admin_connections: int = 64
    # An admin client that says nothing, or stops in the middle of a line, gives its place back.
    admin_idle_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written on stderr (`[log]`)."""

    format: Literal["human", "json"] = "human"
    level: Literal["debug", "info", "warning", "error"] = "info"
    # A flood of one event becomes one line with a count, so no peer can fill the disk.
    max_repeats_per_s: int = 20


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The certificate of the encrypted listeners (`[tls]`), read again on SIGHUP."""

    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class NativeSettings(NativeLimits):
    """The native port: its bounds, and who its callers are (`[native]`)."""

    # Lines of NAME TOKEN [EXPIRES], mode 0600; read again on SIGHUP.
    tokens: Path | None = None
    # Clients of grpc+tls must show a certificate that one of these has signed.
    client_authorities: Path | None = None


@dataclass(frozen=True, slots=True)
class PirateSettings(PirateLimits):
    """Pirate: its bounds, and who its callers are (`[pirate]`)."""

    # Clients must show a CURVE key that `polybus keys allow` has let in; needed beyond loopback.
    curve: bool = False
    # The folder of the bus's own key and of those it lets in; None: `pirate` in the data folder.
    keys: Path | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration: the top-level keys, then one field a section."""

    # DIALECT=ADDRESS each; empty: every dialect at its default address.
    listen: tuple[str, ...] = ()
    # None: see `runtime.data_folder`.
    data: Path | None = None
    engine: str = ""
    durability: Literal["fsync", "interval"] = "fsync"
    # With `interval`, what a crash may take: as long as a person takes for "at once".
    commit_interval_ms: int = 50
    # Listeners beyond loopback without TLS must be asked for by name.
    insecure: bool = False
    # Rules of the policy. `polybus acl add` keeps its own in the data folder.
    acl: tuple[Rule, ...] = ()

    server: ServerSettings = field(default_factory=ServerSettings)
    log: LogSettings = field(default_factory=LogSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    limits: Limits = field(default_factory=Limits)
    quotas: QuotaLimits = field(default_factory=QuotaLimits)
    rqueue: RqueueLimits = field(default_factory=RqueueLimits)
    freud: FreudLimits = field(default_factory=FreudLimits)
    gsb: GsbLimits = field(default_factory=GsbLimits)
    native: NativeSettings = field(default_factory=NativeSettings)
    pirate: PirateSettings = field(default_factory=PirateSettings)


UNBOUNDED = float("inf")

BOUNDS: dict[str, tuple[float, float]] = {
    # Longer than a minute is a mistake: nobody means to lose that much.
    "commit_interval_ms": (1, 60_000),
    # With the flush of the logs and the closing of sockets it stays under 10 s.
    "server.drain_timeout_s": (0, 8),
    "server.max_admin_connections": (1, 4096),
    "log.max_repeats_per_s": (1, 10_000),
    # One descriptor each, and Linux has no more than this for one process.
    "limits.max_connections": (1, 1_048_576),
    # The kernel's topic numbers have 32 bits, and so have its connection numbers.
    "limits.max_topics": (1, 2**31 - 1),
    "limits.max_subscriptions_per_connection": (1, 2**31 - 1),
    # Below a receive buffer every burst would count as a slow reader.
    "limits.outbox_high_water_bytes": (64 * KIB, UNBOUNDED),
    "limits.outbox_max_bytes": (64 * KIB, UNBOUNDED),
    "limits.slow_consumer_min_bytes_per_s": (0, UNBOUNDED),
    # 0 is a quota, too: none of it.
    "quotas.quota_bytes": (0, UNBOUNDED),
    "quotas.quota_subscriptions": (0, UNBOUNDED),
    "quotas.quota_topics": (0, UNBOUNDED),
    "quotas.quota_connections": (0, UNBOUNDED),
    # A PART of one byte under the longest topic must fit: the kernel insists on it.
    "rqueue.max_payload": (282, 64 * MIB),
    "rqueue.max_message_bytes": (1, 64 * MIB),
    # A message of 64 MiB must fit, and a block holds no more.
    # 0: subscribers are never dropped for being away.
    "pirate.subscriber_ttl_s": (0, UNBOUNDED),
    # A message of the largest size must come through.
    "pirate.max_unfinished_bytes": (66 * MIB, UNBOUNDED),
    "pirate.max_unread_bytes": (66 * MIB, UNBOUNDED),
    "pirate.max_uncommitted_bytes": (65 * MIB, UNBOUNDED),
    "native.max_batch_bytes": (65 * MIB, 255 * MIB),
    "native.max_uncommitted_bytes": (65 * MIB, UNBOUNDED),
    "native.max_action_bytes": (64 * KIB, 64 * MIB),
    # A batch must be answered again as long as its producer may send it again.
    "native.max_batches_in_flight": (1, 1024),
    "native.max_bytes_in_flight": (64 * KIB, UNBOUNDED),
    "native.max_calls": (1, 65_536),
    "native.max_connections": (1, 1_000_000),
    "native.max_waits": (1, 65_536),
    "native.max_wait_s": (0, 3600),
    "native.default_shards": (1, 512),
    "native.max_groups": (1, 65_536),
    "native.max_user_groups": (1, 65_536),
    "native.max_members": (1, 1024),  # a roster is one record
    "native.max_fetch_rows": (1, 1_048_576),
    "native.max_fetch_bytes": (64 * KIB, 256 * MIB),
    # A message of one byte under the longest name must fit, and no reader takes one over 64 MiB.
    "freud.max_frame_bytes": (260, 64 * MIB),
    # A call with the longest address and id must fit, and an outbox must hold one.
    "gsb.max_packet_bytes": (4 * KIB, 64 * MIB),
    "gsb.deadline_ms": (1, 2**32 - 1),
    # Below a receive buffer every burst would stop a stream.
    "gsb.outbox_full_bytes": (64 * KIB, 16 * MIB),
    "gsb.outbox_free_bytes": (0, 16 * MIB),
    "gsb.free_partials": (1, 65_536),
    "gsb.free_bytes": (1, 16 * MIB),
}
