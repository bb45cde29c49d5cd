"""A master of Spark is looked at before Spark is: it tries one that nobody answers on for a
minute, and then tells of something else. And one whose workers have no room is waited for
without a word.
"""

from __future__ import annotations

import re
import socket
import time
from typing import TYPE_CHECKING

from polybus.errors import ConfigError, NotConnected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDALONE = "spark://"
FORMS = "local[*], spark://HOST:PORT, yarn, or k8s://…"
PLACE = r"(?:\[[^\]]+\]|[^:,/\[\]]+):\d+"
FORM = re.compile(rf"local(-cluster)?(\[[*\d, ]+\])?|yarn|k8s://.+|spark://{PLACE}(,{PLACE})*")
CONNECT_S = 5.0
EXECUTOR_S, LOOK_EVERY_S = 20.0, 0.2


def check_master(master: str) -> None:
    """`ConfigError` if it is none, `NotConnected` if no standalone master answers there."""
    if FORM.fullmatch(master) is None:
        raise ConfigError(f"{master!r} is no master of Spark: give {FORMS}")
    if master.startswith(STANDALONE):
        _check_answers(master)


def _check_answers(master: str) -> None:
    """One of several is enough: the others stand by."""
    why: Exception | None = None
    for place in master.removeprefix(STANDALONE).split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            return
        except (OSError, OverflowError) as error:
            why = error
    raise NotConnected(f"no master of Spark answers at {master} ({why}): start it, or correct it")


def lacks_executors(spark: SparkSession) -> bool:
    """Whether a standalone master has started none, though it had time to."""
    context = spark.sparkContext
    is_asked_later = context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"
    if is_asked_later or not str(context.master).startswith(STANDALONE):
        return False
    ends_s = time.monotonic() + EXECUTOR_S
    while time.monotonic() < ends_s:
        if context._jsc.sc().getExecutorMemoryStatus().size() > 1:  # the driver is one of them
            return False
        time.sleep(LOOK_EVERY_S)
    return True
