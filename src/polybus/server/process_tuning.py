"""Settings of the process: descriptors, memory, garbage collection."""

from __future__ import annotations

import gc
import os
import resource
import sys
from dataclasses import dataclass, replace

from polybus.kernel import scheduler
from polybus.kernel.allocator import keep_freed_buffers
from polybus.model.limits import Limits

# The loop does some ten microseconds at a time, and every client of its dialects waits for it:
# it need not wait for the end of others' slices, which are a millisecond and more. With a full
# native load beside it, it waited for a processor for over 0.3 ms half as often.
LOOP_SLICE_US = 100
# Descriptors that are no connections: listeners, logs, the lock, the store, the admin socket.
RESERVED_DESCRIPTORS = 128


@dataclass(frozen=True, slots=True)
class DescriptorLimit:
    """The limit on open files before and after it was raised."""

    before: int
    now: int


def prepare_process() -> DescriptorLimit:
    """Set up the process; call once, before anything is opened."""
    _open_standard_streams()
    keep_freed_buffers()
    return _raise_descriptor_limit()


def freeze_heap() -> None:
    """Everything is loaded and stays: the garbage collector need not look at it again.

    To be called on the loop's thread.
    """
    gc.collect()
    gc.freeze()
    scheduler.set_time_slice_us(LOOP_SLICE_US)


def fit_limits(limits: Limits, descriptors: DescriptorLimit) -> Limits:
    """The limits that this process can keep: each connection needs a descriptor."""
    most = max(1, descriptors.now - RESERVED_DESCRIPTORS)
    return replace(limits, max_connections=min(limits.max_connections, most))


def _open_standard_streams() -> None:
    """The parent may have closed 0, 1 or 2: a socket must not get that number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def _raise_descriptor_limit() -> DescriptorLimit:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return DescriptorLimit(soft, soft)  # a sandbox may forbid it: then fewer connections fit
    return DescriptorLimit(_finite(soft), _finite(hard))


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
