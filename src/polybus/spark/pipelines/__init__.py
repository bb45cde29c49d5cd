"""Spark jobs on durable topics. Each is a function here and a command: `polybus pipeline NAME`.

A pipeline is a file of this folder with a function of the same name, or a folder with a module
`NAME_pipeline.py` that has it. (Function `dead_letters` becomes the command `dead-letters`.) The
first parameter of the function is the session. The others are the arguments of the command, so
each is annotated for Typer; `pipeline_arguments.py` has those that several pipelines take. The
parameter `tell` is the callback for progress. The first line of the docstring is the command's
help. The function returns a `Summary`. A file without such a function is a part of other
pipelines. A new file is a new command; it is not registered anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from polybus.spark.pipelines.query_run import Progress, Summary

if TYPE_CHECKING:  # set by `_find_pipelines` at run time
    from polybus.spark.pipelines.archive import archive
    from polybus.spark.pipelines.dead_letters import dead_letters
    from polybus.spark.pipelines.replay import replay
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
    for module_info in iter_modules(__path__):
        inner = f".{module_info.name}_pipeline" if module_info.ispkg else ""
        module = import_module(f"{__name__}.{module_info.name}{inner}")
        functions[module_info.name] = getattr(module, module_info.name, None)
    return {name: function for name, function in functions.items() if callable(function)}


# Function name → function. All modules are imported before their functions take the same names
# here, so that `pipelines.archive` stays the function when the module is imported again.
PIPELINES = _find_pipelines()
globals().update(PIPELINES)
