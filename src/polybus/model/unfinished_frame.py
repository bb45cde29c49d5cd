"""A frame of which a part has arrived, as a session describes it."""

from __future__ import annotations

from typing import NamedTuple


class UnfinishedFrame(NamedTuple):
    """`missing_bytes` is None if the session cannot know."""

    missing_bytes: int | None
    likely_cause: str
