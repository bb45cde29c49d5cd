"""Options of `format("polybus")`: names and allowed values.

Spark passes options as text, with names in any case. An unknown name is an error, because a
misspelt `endingOffset` would silently read too much. Spark's own options are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polybus.errors import UsageError
from polybus.native.client.native_options import bus_url
from polybus.store.engine_registry import absolute_url, is_store_url

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
# Options that Spark passes to every source and sink.
SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})

FLAGS = {"true": True, "false": False}


class SparkOptions:
    """The options of one source or sink. Raises `UsageError` that names the invalid option."""

    def __init__(self, given: Mapping[str, str], allowed: Sequence[str]) -> None:
        known = {name.lower(): name for name in allowed}
        self._given: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() in known:
                self._given[known[name.lower()]] = value
            elif name.lower() not in SPARKS_OWN:
                raise UsageError(f"unknown option {name!r}: use one of {', '.join(allowed)}")

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the value, or `default` if it was not given. An empty value is an error."""
        value = self._given.get(name)
        if value is None:
            return default
        if not value.strip():
            raise UsageError(f"option {name} must not be empty; give it a value, or leave it out")
        return value.strip()

    def required(self, name: str, example: str) -> str:
        """Return the value; raises `UsageError` with an example if it was not given."""
        value = self.text(name)
        if value is None:
            raise UsageError(f"option {name} is missing: .option({name!r}, {example!r})")
        return value

    def count(self, name: str) -> int | None:
        """Return the value as an integer > 0, or None if it was not given."""
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 1 << 63):
            raise UsageError(f"option {name} must be an integer > 0, got {value!r}")
        return int(value)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = (self.text(name) or default).lower()
        if value not in allowed:
            raise UsageError(f"option {name} must be one of {', '.join(allowed)}, got {value!r}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        return FLAGS[self.choice(name, tuple(FLAGS), str(default).lower())]

    @property
    def bus(self) -> str:
        """The URL of the bus, or of a store with an absolute path.

        Must be called on the driver: tasks may have another working folder and environment.
        """
        url = bus_url(self.text("bus"), os.environ)
        if url.startswith("nats:"):
            raise UsageError(f"{url}: NATS is not supported; give polybus://… or a store as bus")
        return absolute_url(url) if is_store_url(url) else url

    @property
    def archive(self) -> str | None:
        """The absolute path of the archive, or None to read the log alone."""
        folder = self.text("archive")
        return None if folder is None else str(Path(folder).absolute())
