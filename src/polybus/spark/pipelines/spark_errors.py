"""Polybus errors from the text of Spark errors.

Spark reports an error of a task or of the source's process as text. It is an error of polybus; or
SQL that fails for a message, which the user must correct; or a full disk under Spark's own files.
While it creates an error, Spark also writes it to its log as JSON, which would repeat the message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger

from polybus import errors

FAULT = re.compile(r"polybus\.errors\.(\w+): ([^\n]+?)(?: SQLSTATE: \w+)*(?:\n|$)")
# Spark prints the SQL text after the state; or the state is a data exception (22…) or raise_error()
# (P0001).
STATES = r"(?:\w+\n== SQL|22\w{3}|P0001)"
OF_SQL = re.compile(rf"\[[A-Z_.\d]+\] (?!Query \[)([^\n]+?)\.? SQLSTATE: {STATES}")
FULL = re.compile("No space left on device|Disk quota exceeded")
UNREAD = re.compile(r"\[FAILED_READ_FILE[.\w]*\] [^\n]*? reading file (?:file://)?(\S+?)\.? ")
# Options of the source → flags of the command line.
FLAG_NAMES = {
    "set failOnDataLoss=false to go on": "--accept-loss goes on",
    "set failOnDataLoss=false": "give --accept-loss",
    "checkpointLocation": "--checkpoint",
}
LOGS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


@contextmanager
def raise_own_errors() -> Iterator[None]:
    """Raise the polybus error inside an error of Spark, if there is one."""
    try:
        with mute_query_loggers():
            yield
    except (PySparkException, Py4JError) as error:
        match = parse_own_error(str(error))
        if match is None:
            raise
        raise match from None


def parse_own_error(text: str) -> errors.PolybusError | None:
    """Return the polybus error that the text of a Spark error stands for; None if there is none."""
    match = FAULT.search(text)
    kind = getattr(errors, match[1], None) if match else None
    if match is not None and isinstance(kind, type) and issubclass(kind, errors.PolybusError):
        message = match[2].strip()
        for option, flag in FLAG_NAMES.items():
            message = message.replace(option, flag)
        return errors.error_from_code(kind.code, message)
    failed = OF_SQL.search(text)
    if failed is not None:
        return errors.UsageError(f"correct the SQL, which fails for a message: {failed[1]}")
    unread = UNREAD.search(text)
    if unread is not None:
        return errors.Damaged(f"{unread[1]} cannot be read: restore it")
    if FULL.search(text) is not None:
        return errors.StoreFull(
            "the disk of the checkpoint, or of Spark's own files, is full: free space and start "
            "again; finished work is kept, and the run continues from there"
        )
    return None


@contextmanager
def mute_query_loggers() -> Iterator[None]:
    """Mute Spark's log of query errors.

    The loggers must be created by PySparkLogger: a plain logger of the same name takes no fields.
    """
    logs = [PySparkLogger.getLogger(name) for name in LOGS]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, was_disabled in zip(logs, before, strict=True):
            log.disabled = was_disabled
