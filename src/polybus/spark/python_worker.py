"""The Python processes that Spark starts: what is known of them, and what they are spared.

Spark has Python's collector go over all that a worker has loaded, each time it has done
something: tens of milliseconds, in each of the four that take part in an epoch, while the
others wait for a processor. What a worker holds when it is asked for the second time it
keeps: that is frozen, and the collector passes over it from then on.

Where our errors become Spark's.

Spark shows a fault of Python with the whole way it came, and what it says at the very
end. An error of polybus is no fault of a program but an answer to its user, so the
worker that raises one is told to show it alone: the first line then says what to do.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from polybus.errors import PolybusError

RUNTIME, WORKER = "SPARK_PYTHON_RUNTIME", "PYTHON_WORKER"
_asked = 0
WITHOUT_TRACEBACK = "SPARK_HIDE_TRACEBACK"  # looked at by Spark when a worker fails


def is_worker() -> bool:
    """Whether Spark has started this process."""
    return os.environ.get(RUNTIME) == WORKER


def note_request() -> None:
    """Called once for whatever a worker is asked to do."""
    global _asked
    _asked += 1
    if _asked == 2 and is_worker():
        gc.freeze()


@contextmanager
def hide_traceback() -> Iterator[None]:
    """In the workers that Spark starts: each ends with the first error it raises."""
    try:
        yield
    except PolybusError:
        os.environ[WITHOUT_TRACEBACK] = "1"
        raise
