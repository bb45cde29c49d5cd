"""The Python workers that Spark starts: garbage collection and error output.

Spark runs Python's garbage collector after each request of a worker. It takes tens of
milliseconds to walk all loaded modules, in each of the four workers of an epoch. Objects that
exist at the second request live as long as the worker, so they are frozen: the collector skips
them from then on.

Spark prints a Python exception with the whole traceback and the message last. An error of polybus
is an answer to the user, so a worker that raises one asks Spark to print the message alone.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from polybus.errors import PolybusError

QUERY_ID = "sql.streaming.queryId"  # property of a task: the id of its streaming query
_request_count = 0


def is_worker() -> bool:
    """Return whether Spark started this process as a Python worker."""
    return os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER"


def note_request() -> None:
    """Count a request of Spark. Must be called once per request.

    Freezes the objects of a worker at its second request.
    """
    global _request_count
    _request_count += 1
    if _request_count == 2 and is_worker():
        gc.freeze()


@contextmanager
def hide_traceback() -> Iterator[None]:
    """Ask Spark to print a polybus error without traceback. A worker ends with its first error."""
    try:
        yield
    except PolybusError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"  # Spark reads it when a worker fails
        raise
