"""Jobs of Spark on durable topics, each a function here and a command: `polybus pipeline NAME`.

A pipeline is one file in this folder with a function of the same name (`dead_letters.py` has
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

from polybus.spark.pipelines.running import Progress, Summary

if TYPE_CHECKING:  # what `_found` finds
    from polybus.spark.pipelines.archive import archive
    from polybus.spark.pipelines.dead_letters import dead_letters
    from polybus.spark.pipelines.replay import replay
    from polybus.spark.pipelines.retain import retain
    from polybus.spark.pipelines.route import route
    from polybus.spark.pipelines.stats import stats

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


def _found() -> dict[str, Callable[..., Summary]]:
    names = [one.name for one in iter_modules(__path__) if not one.ispkg]
    modules = {name: import_module(f"{__name__}.{name}") for name in names}
    functions: dict[str, Any] = {
        name: getattr(module, name, None) for name, module in modules.items()
    }
    return {name: one for name, one in functions.items() if callable(one)}


# Name of the function → the function. Files are loaded before their functions take the same
# names here, so that `pipelines.archive` is the function, whoever imports the file later.
PIPELINES = _found()
globals().update(PIPELINES)
