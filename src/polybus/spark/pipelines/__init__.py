"""Jobs of Spark on durable topics, each a function here and a command: `polybus pipeline NAME`.

A pipeline is one file in this folder with a function of the same name, or a folder with a
file `NAME_pipeline.py` that has it (`dead_letters.py` has
`dead_letters`, and the command is `dead-letters`). Its first parameter is the session; the
others are what the command line gives, so each is annotated for Typer (`arguments.py` has
those that several take), but `tell`, which gets the progress. The first line of its docstring
is the command's help, and it returns a `Summary`. A file without such a function is a part of
others. Nothing else is to be written down anywhere: a new file is a new command.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from polybus.spark.pipelines.query_run import Progress, Summary

if TYPE_CHECKING:  # what `_found` finds
    from polybus.spark.pipelines.archive import archive
    from polybus.spark.pipelines.dead_letters.dead_letters_pipeline import dead_letters
    from polybus.spark.pipelines.replay.replay_pipeline import replay
    from polybus.spark.pipelines.retain import retain
    from polybus.spark.pipelines.route import route
    from polybus.spark.pipelines.stats.stats_pipeline import stats

__all__ = [
    "PIPELINES",
    "Progress",
    "Summary",
    "archive",
    "dead_letters",
    "replay",
    "retain",
    "route",
    "stats",
]


def _find_pipelines() -> dict[str, Callable[..., Summary]]:
    functions: dict[str, Any] = {}
    for one in iter_modules(__path__):
        inner = f".{one.name}_pipeline" if one.ispkg else ""
        module = import_module(f"{__name__}.{one.name}{inner}")
        functions[one.name] = getattr(module, one.name, None)
    return {name: one for name, one in functions.items() if callable(one)}


# Name of the function → the function. Files are loaded before their functions take the same
# names here, so that `pipelines.archive` is the function, whoever imports the file later.
PIPELINES = _find_pipelines()
globals().update(PIPELINES)
