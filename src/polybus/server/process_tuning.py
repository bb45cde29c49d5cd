"""Settings of the process: descriptors, memory, garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from polybus.bus.dialect_registry import installed_dialects
from polybus.kernel import scheduler
from polybus.kernel.allocator import keep_freed_buffers
from polybus.server.listener_plan import ADMIN, ListenerSpec
from polybus.server.settings import Settings
from polybus.transports.descriptor_reserve import descriptor_reserve

# A callback of the loop runs about ten microseconds, and every client of its dialects waits for
# it. With a short slice the scheduler lets the loop preempt threads whose slices are a millisecond
# and more. Beside a full native load, waits over 0.3 ms for a processor became half as frequent.
LOOP_SLICE_US = 100
# Descriptors that are not connections: listeners, logs, the lock, the store, gRPC's, libzmq's.
OWN_DESCRIPTORS = 64
THREAD_DESCRIPTORS = 2  # an epoll set and an event
# Connections in the reserve that the bus has not closed yet, if a transport may take all others.
SURPLUS_DESCRIPTORS = 32
# Most stream connections that the reserve has room for: those that begin while such a transport
# has taken all other descriptors. Admin connections have room of their own in it.
MAX_STREAM_RESERVE = 1024


@dataclass(frozen=True, slots=True)
class DescriptorLimit:
    """The limit on open files before and after it was raised."""

    before: int
    now: int


@dataclass(frozen=True, slots=True)
class DescriptorUse:
    """The descriptors that the listening dialects take beside those of stream connections."""

    per_connection: Mapping[str, int]  # of dialects that count their connections apart
    needs_reserve: bool  # a transport may take all descriptors

    @classmethod
    def of(cls, listeners: Iterable[ListenerSpec]) -> DescriptorUse:
        per_connection: dict[str, int] = {}
        needs_reserve = False
        for listener in listeners:
            if listener.dialect == ADMIN:
                continue
            dialect = installed_dialects()[listener.dialect]
            if dialect.descriptors_per_connection is not None:
                each = dialect.descriptors_per_connection[listener.address.is_encrypted]
                per_connection[dialect.name] = max(each, per_connection.get(dialect.name, 0))
            needs_reserve |= dialect.may_take_all_descriptors
        return cls(per_connection, needs_reserve)


def prepare_process() -> DescriptorLimit:
    """Set up the process and raise its descriptor limit. Call it before anything is opened."""
    # The parent may have closed 0, 1 or 2, and a socket must not get that number.
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    keep_freed_buffers()
    # gRPC writes a line to stderr for each failed handshake or thread, past the limit of repeated
    # log lines, so a client could fill the disk. The bus logs and counts what it cuts itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # a sandbox may forbid it; then fewer connections fit
        hard = soft
    return DescriptorLimit(_finite(soft), _finite(hard))


def freeze_heap() -> None:
    """Exempt all loaded objects from garbage collection. Call it on the loop's thread."""
    gc.collect()
    gc.freeze()
    scheduler.set_time_slice_us(LOOP_SLICE_US)


def fit_limits(settings: Settings, descriptors: DescriptorLimit, use: DescriptorUse) -> Settings:
    """Return the settings with limits of connections that fit the descriptors.

    Connections that a dialect counts apart and those of all others are lowered in proportion, so
    that none may take the descriptors of the other. There must be a reserve (`reserve_streams`),
    too, if a transport may take all descriptors.
    """
    own_descriptors = OWN_DESCRIPTORS + THREAD_DESCRIPTORS * settings.stream_threads
    most = max(2, descriptors.now - own_descriptors - settings.server.max_admin_connections)
    streams = settings.limits.max_connections
    if use.needs_reserve:
        most = max(3, most - SURPLUS_DESCRIPTORS)
        streams += _stream_reserve(settings)
    apart = {
        name: settings.section(name).max_connections * each
        for name, each in use.per_connection.items()
    }
    wanted = streams, sum(apart.values())
    if sum(wanted) <= most:
        return settings
    # At least an eighth for each, so that a large setting of one does not exclude the other.
    least = max(1, most // 8)
    share = most * wanted[1] // sum(wanted)
    own = min(wanted[1], max(least, min(most - max(2, least), share)))
    streams = min(wanted[0], most - own)
    if use.needs_reserve:
        streams = max(1, streams // 2, streams - MAX_STREAM_RESERVE)
    limits = replace(settings.limits, max_connections=streams)
    dialects = dict(settings.dialects)
    for name, each in use.per_connection.items():
        connections = max(1, own * apart[name] // wanted[1] // each)
        dialects[name] = replace(settings.section(name), max_connections=connections)
    return replace(settings, limits=limits, dialects=dialects)


def reserve_streams(settings: Settings, descriptors: DescriptorLimit, use: DescriptorUse) -> None:
    """Reserve descriptors for stream and admin connections, for when none is left.

    `settings` are those of `fit_limits`.
    """
    reserve = _stream_reserve(settings) + settings.server.max_admin_connections
    start = max(OWN_DESCRIPTORS, descriptors.now - reserve - SURPLUS_DESCRIPTORS)
    if not use.needs_reserve or start >= descriptors.now:
        return
    # A sandbox may forbid it. Then a flood of one listener may delay clients of the others.
    with contextlib.suppress(OSError, ValueError):
        descriptor_reserve.keep(start)


def _stream_reserve(settings: Settings) -> int:
    return min(settings.limits.max_connections, MAX_STREAM_RESERVE)


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
