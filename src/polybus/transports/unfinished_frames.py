"""Frames that stay unfinished: reported once each, the connection stays open.

A peer that writes a wrong length waits for an answer while the bus waits for the rest of the
frame, and neither side notices. So a connection whose frame has been incomplete for
`timeout_s` is reported, with the bytes that are missing and the likely cause.

The connections are looked at once a second, so that receiving costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.model.unfinished_frame import UnfinishedFrame
    from polybus.transports.stream_connection import StreamConnection

LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class WatchedFrame:
    """`takes` identifies the frame: it changes when the session consumes bytes."""

    takes: int
    since_s: float
    is_reported: bool = False


class UnfinishedFrames:
    def __init__(
        self,
        timeout_s: float,
        on_unfinished: Callable[[str, StreamConnection, UnfinishedFrame], None],
    ) -> None:
        """`on_unfinished` gets the dialect, the connection and the frame."""
        self._timeout_s = timeout_s
        self._on_unfinished = on_unfinished
        self._sources: list[tuple[str, Iterable[StreamConnection]]] = []
        self._watched: dict[StreamConnection, WatchedFrame] = {}
        self._next_look_s = 0.0

    def add(self, dialect: str, connections: Iterable[StreamConnection]) -> None:
        """Watch the connections of a listener; the collection is read at each look."""
        self._sources.append((dialect, connections))

    def remove(self, connections: Iterable[StreamConnection]) -> None:
        """Watch a collection no longer."""
        self._sources = [one for one in self._sources if one[1] is not connections]

    def tick(self, now_s: float) -> None:
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        watched: dict[StreamConnection, WatchedFrame] = {}
        for dialect, connections in self._sources:
            for connection in connections:
                if connection.awaits_more:
                    watched[connection] = self._look(dialect, connection, now_s)
        self._watched = watched

    def _look(self, dialect: str, connection: StreamConnection, now_s: float) -> WatchedFrame:
        frame = self._watched.get(connection)
        if frame is None or frame.takes != connection.takes:
            return WatchedFrame(connection.takes, now_s)
        if not frame.is_reported and now_s - frame.since_s >= self._timeout_s:
            unfinished = connection.describe_unfinished()
            if unfinished is not None:
                frame.is_reported = True
                self._on_unfinished(dialect, connection, unfinished)
        return frame
