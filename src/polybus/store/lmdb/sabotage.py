"""Ways to break this engine on purpose, so that tests of faults can be seen to fail.

$POLYBUS_SABOTAGE lists names, separated by commas; it is read once, and is no setting:
nobody but the tests of faults sets it.

    stamps-off      a repeated request is done again
    epochs-off      a producer that somebody newer has taken over goes on
    sync-off        nothing waits for the disk
    checksum-off    bytes are taken for what was written, whatever they are
    torn-commits    what one transaction should hold is spread over two
    keep-nothing    commits are answered, and not written
    caches-kept     what the writer knows is not dropped when a transaction fails
    reader-check-off        dead readers are never cleared
    long-read-transactions  a reader keeps its transaction open between reads
    compact-sync-off        a compacted store is used before it is on disk
    verify-blind            verifying looks at nothing
    descriptor-a-commit     writing takes a descriptor each time
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "POLYBUS_SABOTAGE"
_chosen = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))

STAMPS_OFF: Final = "stamps-off" in _chosen
EPOCHS_OFF: Final = "epochs-off" in _chosen
SYNC_OFF: Final = "sync-off" in _chosen
CHECKSUM_OFF: Final = "checksum-off" in _chosen
TORN_COMMITS: Final = "torn-commits" in _chosen
KEEP_NOTHING: Final = "keep-nothing" in _chosen
CACHES_KEPT: Final = "caches-kept" in _chosen
READER_CHECK_OFF: Final = "reader-check-off" in _chosen
LONG_READ_TRANSACTIONS: Final = "long-read-transactions" in _chosen
COMPACT_SYNC_OFF: Final = "compact-sync-off" in _chosen
VERIFY_BLIND: Final = "verify-blind" in _chosen
DESCRIPTOR_A_COMMIT: Final = "descriptor-a-commit" in _chosen
