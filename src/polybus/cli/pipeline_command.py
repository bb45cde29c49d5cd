"""`polybus pipeline NAME`: jobs of Spark on durable topics, one file each.

Commands are made of the functions in `polybus.spark.pipelines`: what a function takes is what
its command takes. Here stands what all have: the session, the progress, the summary.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from polybus.cli.pipeline_progress import print_summary, show_pipeline

if TYPE_CHECKING:
    from polybus.spark.pipelines import Summary

EXIT_CODES = """\b
Exit codes:
  0   done, or ended by SIGTERM
  2   a wrong argument, a folder that cannot be used, a full disk
  3   no bus answers, or it went away
  4   the bus refused: no such topic, not allowed; or another one is at work there
  1   a defect of polybus, or of Spark
  130 Ctrl-C
"""
INTERRUPTED = 130
NO_EXECUTOR = (
    "{} has no executor for us yet: its workers are busy, have less memory or fewer cores than "
    "is asked for (spark.executor.memory: 1g if nothing else is set), or executors end at once"
)
INJECTED_PARAMETERS = ("spark", "tell")  # by this module, not by the command line

Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Of a Spark cluster. [default: local[*]]"),
]
LogLevel = Annotated[
    str,
    typer.Option("--spark-log", metavar="LEVEL", help="Show Spark's own log: WARN, INFO."),
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    from polybus.spark.pipelines import PIPELINES

    group = typer.Typer()
    for function, pipeline in PIPELINES.items():
        verb, about = function.replace("_", "-"), (pipeline.__doc__ or "").strip()
        group.command(verb, help=about, epilog=EXIT_CODES)(command_of(verb, pipeline))
    root.add_typer(group, name=name, help=help_line, epilog=EXIT_CODES)


def command_of(verb: str, pipeline: Callable[..., Summary]) -> Callable[..., int]:
    """What Typer can make a command of: the pipeline's parameters, and those of the session."""

    @wraps(pipeline)
    def command(*, master: str | None, spark_log: str, **given: Any) -> int:
        with show_pipeline(verb) as tell:
            summary = pipeline(_session(verb, master, spark_log), tell=tell, **given)
        print_summary(verb, summary)
        return INTERRUPTED if summary.stopped_by == signal.SIGINT else 0

    hints = get_type_hints(pipeline, include_extras=True)
    parameters = [
        one.replace(annotation=hints[one.name], kind=one.KEYWORD_ONLY)
        for one in inspect.signature(pipeline).parameters.values()
        if one.name not in INJECTED_PARAMETERS
    ]
    for name, hint, default in (("master", Master, None), ("spark_log", LogLevel, "OFF")):
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default
            )
        )
    del command.__wrapped__  # or its signature would be looked at
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _session(verb: str, master: str | None, log_level: str) -> Any:
    import polybus.spark
    from polybus.spark.spark_session import lacks_executors

    os.environ["PYSPARK_PYTHON"] = sys.executable
    found = polybus.spark.session(master, name=f"polybus {verb}", log_level=log_level.upper())
    if lacks_executors(found):
        print(f"{verb}: {NO_EXECUTOR.format(master)}", file=sys.stderr, flush=True)
    return found
