"""What goes wrong in a task or beside the driver comes out of Spark as text: which error it was.

Either one of ours; or SQL that Spark could not carry out for some message: that is the user's to
correct, and Spark says how, on one line among many; or a disk that has no room for what Spark
keeps of its own. While it makes an error, Spark writes the same
to its log, as JSON; who is told of the error needs no second copy.
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
# Spark shows the piece of SQL; or the state says so: data that will not do, raise_error().
STATES = r"(?:\w+\n== SQL|22\w{3}|P0001)"
OF_SQL = re.compile(rf"\[[A-Z_.\d]+\] (?!Query \[)([^\n]+?)\.? SQLSTATE: {STATES}")
FULL = re.compile("No space left on device|Disk quota exceeded")
UNREAD = re.compile(r"\[FAILED_READ_FILE[.\w]*\] [^\n]*? reading file (?:file://)?(\S+?)\.? ")
# What the source's option is called on a command line.
FLAG_NAMES = {
    "set failOnDataLoss=false to go on": "--accept-loss goes on",
    "set failOnDataLoss=false": "give --accept-loss",
    "checkpointLocation": "--checkpoint",
}
LOGS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


@contextmanager
def raise_own_errors() -> Iterator[None]:
    """An error of ours that comes as text inside one of Spark's is raised as what it is."""
    try:
        with mute_query_loggers():
            yield
    except (PySparkException, Py4JError) as error:
        found = parse_own_error(str(error))
        if found is None:
            raise
        raise found from None


def parse_own_error(text: str) -> errors.PolybusError | None:
    found = FAULT.search(text)
    kind = getattr(errors, found[1], None) if found else None
    if found is not None and isinstance(kind, type) and issubclass(kind, errors.PolybusError):
        return errors.error_from_code(kind.code, _as_asked(found[2].strip()))
    failed = OF_SQL.search(text)
    if failed is not None:
        return errors.UsageError(f"correct the SQL, it fails for a message: {failed[1]}")
    unread = UNREAD.search(text)
    if unread is not None:
        return errors.Damaged(f"{unread[1]} cannot be read: restore it")
    if FULL.search(text) is not None:
        return errors.StoreFull(
            "the disk of the checkpoint, or of Spark's own files, is full: make room and start "
            "again, what is done stays, and the rest goes on from there"
        )
    return None


def _as_asked(text: str) -> str:
    for option, asked in FLAG_NAMES.items():
        text = text.replace(option, asked)
    return text


@contextmanager
def mute_query_loggers() -> Iterator[None]:
    """Of Spark's own class: one that was made by another name's first user takes no fields."""
    logs = [PySparkLogger.getLogger(name) for name in LOGS]
    before = [one.disabled for one in logs]
    for one in logs:
        one.disabled = True
    try:
        yield
    finally:
        for one, was_disabled in zip(logs, before, strict=True):
            one.disabled = was_disabled
