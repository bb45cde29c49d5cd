"""Settings of the native port, the section `[native]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polybus.model.limits import KIB, MIB, NativeLimits
from polybus.model.topic import MAX_SHARDS

UNBOUNDED = float("inf")


@dataclass(frozen=True, slots=True)
class NativeSettings(NativeLimits):
    """The native port: its bounds, and who its callers are (`[native]`)."""

    # Lines of NAME TOKEN [EXPIRES], mode 0600; read again on SIGHUP.
    tokens: Path | None = None
    # Refuse calls without a token; else such a caller is its certificate or its uid.
    require_token: bool = False
    # Clients of grpc+tls must show a certificate that one of these has signed.
    client_authorities: Path | None = None


# (lowest, highest) of each key. A key without a row must be at least 1 (a float: above 0).
BOUNDS: dict[str, tuple[float, float]] = {
    "max_batch_bytes": (65 * MIB, 255 * MIB),
    "max_uncommitted_bytes": (65 * MIB, UNBOUNDED),
    "max_action_bytes": (64 * KIB, 64 * MIB),
    # A batch must be answered again as long as its producer may send it again.
    "max_batches_in_flight": (1, 1024),
    "max_bytes_in_flight": (64 * KIB, UNBOUNDED),
    "max_calls": (1, 65_536),
    "max_streams": (1, 65_536),
    "max_resets_per_s": (1, 65_536),
    "max_user_unpacked_bytes": (MIB, UNBOUNDED),
    "max_unpacked_bytes": (MIB, UNBOUNDED),
    "max_connections": (1, 1_000_000),
    "max_waits": (1, 65_536),
    "max_wait_s": (0, 3600),
    "default_shards": (1, MAX_SHARDS),
    "max_groups": (1, 65_536),
    "max_user_groups": (1, 65_536),
    "max_producers": (1, 16_777_216),
    "max_stages": (1, 1_048_576),
    "max_delayed": (1, 1_000_000_000),
    "max_topic_delayed": (1, 1_000_000_000),
    "max_members": (1, 1024),  # a roster is one record
    "max_fetch_rows": (1, 1_048_576),
    "max_fetch_bytes": (64 * KIB, 256 * MIB),
}
