"""A master of Spark is looked at before Spark is: it tries one that nobody answers on for a
minute, and then tells of something else.
"""

from __future__ import annotations

import re
import socket

from polybus.errors import ConfigError, NotConnected

STANDALONE = "spark://"
FORMS = "local[*], spark://HOST:PORT, yarn, or k8s://…"
PLACE = r"(?:\[[^\]]+\]|[^:,/\[\]]+):\d+"
FORM = re.compile(rf"local(-cluster)?(\[[*\d, ]+\])?|yarn|k8s://.+|spark://{PLACE}(,{PLACE})*")
CONNECT_S = 5.0


def check(master: str) -> None:
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
