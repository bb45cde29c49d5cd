"""The open connections of a bus, page by page.

The broker's connections are one source; a dialect whose connections do not join the broker adds
its own. A source numbers connections in the order in which they were opened, and a page begins
after a number. So a connection that is open all the time is listed exactly once, whatever
others do between two pages.
"""

from __future__ import annotations

from typing import Any, Protocol

from polybus.errors import UsageError


class ConnectionSource(Protocol):
    """Connections that are described for operators."""

    @property
    def count(self) -> int: ...

    def page(self, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the next connections with a number above `after`, in order of the numbers."""


class ConnectionList:
    def __init__(self) -> None:
        self._sources: list[ConnectionSource] = []

    def add_source(self, source: ConnectionSource) -> None:
        """Add a source. It stays, because cursors contain its index."""
        self._sources.append(source)

    @property
    def count(self) -> int:
        return sum(source.count for source in self._sources)

    def page(self, after: str, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """Return at most `limit` connections and the cursor of the next page, None at the end.

        `after` is empty for the first page. Raises `UsageError` if it is not a cursor.
        """
        index, number = self._parse_cursor(after)
        rows: list[dict[str, Any]] = []
        while index < len(self._sources):
            found = self._sources[index].page(number, limit - len(rows))
            rows += [row for _, row in found]
            if len(rows) == limit:
                return rows, f"{index}.{found[-1][0]}"
            index, number = index + 1, 0
        return rows, None

    def _parse_cursor(self, after: str) -> tuple[int, int]:
        if not after:
            return 0, 0
        index, _, number = after.partition(".")
        # Digits of another script are digits to `isdigit`, and int() would convert them.
        if not (after.isascii() and index.isdigit() and number.isdigit() and len(after) < 40):
            raise UsageError(f"after must be the 'next' of an earlier page, got {after[:64]!r}")
        return int(index), int(number)
