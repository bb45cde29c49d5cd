"""Options of `format("polybus")`: their names, and what may stand in each.

Spark hands options over as text, under names in any case. A name that we do not know is
refused, with the known ones: a misspelt `endingOffset` would else read too much, and say
nothing. Spark's own, which it passes along, are not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polybus.errors import UsageError
from polybus.native.client.native_options import bus_url

SOURCE_OPTIONS = (
    "bus",
    "topic",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxRowsPerBatch",
    "maxBytesPerBatch",
    "rowsPerPartition",
    "failOnDataLoss",
    "archive",
)
SINK_OPTIONS = (
    *("bus", "topic", "producerId", "transactionId", "transactionNumber"),
    "onNewCheckpoint",
)
# What Spark gives to sources and sinks beside what the user has for us.
SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})

STORE_SCHEME = "lmdb:"
NATS_SCHEME = "nats:"
FLAGS = {"true": True, "false": False}


class SparkOptions:
    """What was given to one source or sink. `UsageError` names the option that is wrong."""

    def __init__(self, given: Mapping[str, str], allowed: Sequence[str]) -> None:
        known = {name.lower(): name for name in allowed}
        self._given: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() in known:
                self._given[known[name.lower()]] = value
            elif name.lower() not in SPARKS_OWN:
                raise UsageError(f"there is no option {name!r}: use one of {', '.join(allowed)}")

    def text(self, name: str, default: str | None = None) -> str | None:
        """None, or the default, if it was not given; an empty one is a mistake."""
        value = self._given.get(name)
        if value is None:
            return default
        if not value.strip():
            raise UsageError(f"option {name} is empty: give it a value, or leave it out")
        return value.strip()

    def required(self, name: str, example: str) -> str:
        value = self.text(name)
        if value is None:
            raise UsageError(f"option {name} is missing: .option({name!r}, {example!r})")
        return value

    def count(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 1 << 63):
            raise UsageError(f"option {name} is a whole number above 0, not {value!r}")
        return int(value)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = (self.text(name) or default).lower()
        if value not in allowed:
            raise UsageError(f"option {name} is one of {', '.join(allowed)}, not {value!r}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        return FLAGS[self.choice(name, tuple(FLAGS), str(default).lower())]

    @property
    def bus(self) -> str:
        """The URL of the bus, or `lmdb:` with an absolute path.

        Called on the driver: tasks may run in another folder, with another environment.
        """
        url = bus_url(self.text("bus"), os.environ)
        if url.startswith(NATS_SCHEME):
            raise UsageError(f"{url}: NATS is still to come; give polybus://… or lmdb:PATH as bus")
        if not url.startswith(STORE_SCHEME):
            return url
        folder = url.removeprefix(STORE_SCHEME)
        if not folder:
            raise UsageError("lmdb: needs the data folder of a bus: lmdb:PATH")
        return STORE_SCHEME + str(Path(folder).absolute())

    @property
    def archive(self) -> str | None:
        """The folder of the archive, as an absolute path; None: the log alone is read."""
        folder = self.text("archive")
        return None if folder is None else str(Path(folder).absolute())
