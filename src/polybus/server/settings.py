"""Every setting of the bus: its name, type, default, bounds and the reason for them.

A section is a frozen dataclass, a key is a field of it. Reading TOML, `POLYBUS_*`
variables, range checks and `polybus config show` are derived from these classes. The
section of a dialect is the class `Dialect.limits` of its registration.

A number must be at least 1 (a float: above 0) unless `BOUNDS` has a row for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polybus.bus.dialect_registry import installed_dialects
from polybus.durable import retention_limits
from polybus.durable.retention_limits import NO_LIMIT, parse_limit
from polybus.model.access_rule import Rule
from polybus.model.byte_size import parse_size_bytes
from polybus.model.duration import parse_duration_ms
from polybus.model.limits import KIB, Limits, QuotaLimits
from polybus.server.config_values import ByteSize, Duration

# The fan-out has 64 workers, one of which is the event loop.
MAX_THREADS = 63


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the process behaves (`[server]`)."""

    # Pending output gets this long after SIGTERM. The whole stop must
    # take at most 10 s, so that `systemctl restart` and tests never wait for a kill.
    drain_timeout_s: float = 5.0
    # Threads that serve plain publishes of stream connections; 0: one per core. With 1 the event
    # loop serves them itself, which is faster for few connections.
    threads: int = 1
    # Each admin connection may hold a line of 1 MiB: few people and scripts need more.
    max_admin_connections: int = 64
    # An admin client that says nothing, or stops in the middle of a line, gives its place back.
    admin_idle_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The log on stderr (`[log]`)."""

    format: Literal["human", "json"] = "human"
    level: Literal["debug", "info", "warning", "error"] = "info"
    # A flood of one event becomes one line with a count, so no peer can fill the disk.
    max_repeats_per_s: int = 20


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The certificate of the encrypted listeners (`[tls]`), read again on SIGHUP."""

    certificate: Path | None = None
    key: Path | None = None


NO_DURATION, NO_SIZE = Duration(NO_LIMIT), ByteSize(NO_LIMIT)


@dataclass(frozen=True, slots=True)
class DurableSettings:
    """Retention of new durable topics (`[durable]`), unless their creator chooses another."""

    # Messages older than this go, as in "7d"; "none": no limit, because the disk is the user's.
    retain_age: Duration = NO_DURATION
    # The oldest messages go while the topic is larger than this, as in "10GiB".
    retain_bytes: ByteSize = NO_SIZE
    # The oldest messages go beyond this number; 0: no limit.
    retain_messages: int = 0
    # Messages that a consumer group or a pirate subscriber has not acked stay, or go.
    retain_unread: Literal["keep", "drop"] = "keep"

    def topic_settings(self) -> dict[str, object]:
        """Return them as settings of a topic, without those that are not limited."""
        has_limits = DurableSettings(retain_unread=self.retain_unread) != self
        limits = {
            retention_limits.AGE_MS: parse_limit(self.retain_age, parse_duration_ms),
            retention_limits.BYTES: parse_limit(self.retain_bytes, parse_size_bytes),
            retention_limits.MESSAGES: self.retain_messages or None,
            retention_limits.UNREAD: self.retain_unread if has_limits else None,
        }
        return {name: value for name, value in limits.items() if value is not None}


def default_sections() -> dict[str, Any]:
    """Return the section of each installed dialect that has one, with its defaults."""
    return {one.name: one.limits() for one in installed_dialects() if one.limits is not None}


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration: the top-level keys, one field per section, then the dialects'."""

    # DIALECT=ADDRESS each; empty: every dialect at its default addresses.
    listen: tuple[str, ...] = ()
    # None: see `folders.data_folder`.
    data: Path | None = None
    engine: str = ""
    durability: Literal["fsync", "interval"] = "fsync"
    # With `interval`, the commits that a power cut may lose: short enough to be "at once".
    commit_interval_ms: int = 50
    # Listeners beyond loopback without encryption must be requested explicitly.
    insecure: bool = False
    # Rules of the policy. `polybus acl add` stores its own in the data folder.
    acl: tuple[Rule, ...] = ()

    server: ServerSettings = field(default_factory=ServerSettings)
    log: LogSettings = field(default_factory=LogSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    limits: Limits = field(default_factory=Limits)
    quotas: QuotaLimits = field(default_factory=QuotaLimits)
    durable: DurableSettings = field(default_factory=DurableSettings)
    # Dialect → an instance of its `limits`: the section of the dialect's name.
    dialects: Mapping[str, Any] = field(default_factory=default_sections)

    @property
    def stream_threads(self) -> int:
        """Return the number of threads that serve stream connections; 0: the event loop does."""
        threads = self.server.threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
        return threads if threads > 1 else 0

    def section(self, name: str) -> Any:
        """Return a section by its name, None if the dialect has no settings."""
        return getattr(self, name) if name in CORE_SECTIONS else self.dialects.get(name)


CORE_SECTIONS = ("server", "log", "tls", "limits", "quotas", "durable")
UNBOUNDED = float("inf")

BOUNDS: dict[str, tuple[float, float]] = {
    # More than a minute of lost commits is certainly a mistake.
    "commit_interval_ms": (1, 60_000),
    # With the flush of the logs and the closing of sockets it stays under 10 s.
    "server.drain_timeout_s": (0, 8),
    "server.threads": (0, MAX_THREADS),
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
    "limits.user_share": (0.01, 1),
    # 0: no reserve.
    "limits.admin_reserve": (0, 0.5),
    # 0: no limit.
    "durable.retain_messages": (0, retention_limits.MAX_LIMIT),
    # 0 is a quota, too: none of it.
    "quotas.quota_bytes": (0, UNBOUNDED),
    "quotas.quota_subscriptions": (0, UNBOUNDED),
    "quotas.quota_topics": (0, UNBOUNDED),
    "quotas.quota_connections": (0, UNBOUNDED),
}
