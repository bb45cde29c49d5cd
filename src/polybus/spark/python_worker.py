"""The Python processes that Spark starts: what is known of them, and what they are spared.

Spark has Python's collector go over all that a worker has loaded, each time it has done
something: tens of milliseconds, in each of the four that take part in an epoch, while the
others wait for a processor. What a worker holds when it is asked for the second time it
keeps: that is frozen, and the collector passes over it from then on.
"""

from __future__ import annotations

import gc
import os

RUNTIME, WORKER = "SPARK_PYTHON_RUNTIME", "PYTHON_WORKER"
_asked = 0


def is_worker() -> bool:
    """Whether Spark has started this process."""
    return os.environ.get(RUNTIME) == WORKER


def note_request() -> None:
    """Called once for whatever a worker is asked to do."""
    global _asked
    _asked += 1
    if _asked == 2 and is_worker():
        gc.freeze()
