"""Processes that produce and read (work.py), on one topic."""

from contextlib import AbstractContextManager

from bench.harness.crew import Crew as Load
from bench.harness.crew import crew

__all__ = ["Load", "load"]


def load(url: str, topic: str, processes: int) -> AbstractContextManager[Load]:
    return crew("native-load", "bench.native.work", url, topic, processes=processes)
