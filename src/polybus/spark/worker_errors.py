"""Where our errors become Spark's.

Spark shows a fault of Python with the whole way it came, and what it says at the very
end. An error of polybus is no fault of a program but an answer to its user, so the
worker that raises one is told to show it alone: the first line then says what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from polybus.errors import PolybusError

WITHOUT_TRACEBACK = "SPARK_HIDE_TRACEBACK"  # looked at by Spark when a worker fails


@contextmanager
def hide_traceback() -> Iterator[None]:
    """In the workers that Spark starts: each ends with the first error it raises."""
    try:
        yield
    except PolybusError:
        os.environ[WITHOUT_TRACEBACK] = "1"
        raise
