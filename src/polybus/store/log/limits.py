"""Limits of a log, with their reasons."""

from __future__ import annotations

from typing import Final

# A new log has segments of this size. Preparing one takes some 15 ms of the disk.
SEGMENT_BYTES: Final = 16 << 20
# All segments together: 256 MiB. Until the store has applied and trimmed records, they take
# room here, and a crash makes the store read all of them.
SEGMENT_COUNT: Final = 16
LEAST_SEGMENT_BYTES: Final = 64 << 10
MOST_SEGMENT_BYTES: Final = 1 << 30

# The payload of one record. A record does not continue in the next segment, so up to this
# many bytes at the end of a segment stay unused. Larger commits are staged in several records.
MAX_RECORD_BYTES: Final = 4 << 20
# pwritev takes 1024 buffers; those of one record share a write with other records.
MAX_RECORD_PARTS: Final = 64

# Appended and not yet written: they are in memory.
MAX_PENDING: Final = 4096
MAX_PENDING_BYTES: Final = 64 << 20

# One write and one sync. The number keeps the buffers of a group below those of pwritev.
GROUP_BUFFERS: Final = 1000
GROUP_BYTES: Final = 8 << 20
