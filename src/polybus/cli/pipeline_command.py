"""`polybus pipeline NAME`: run Spark jobs on durable topics.

Each command is made from a function in `polybus.spark.pipelines` and takes its parameters.
This module has the shared parts: session, progress, summary.
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
  0   success, or ended by SIGTERM
  2   invalid argument, unusable folder, or full disk
  3   no bus answers, or the connection was lost
  4   the bus refused: no such topic, not allowed, or another job runs there
  1   internal error of polybus or Spark
  130 interrupted (Ctrl-C)
"""
INTERRUPTED = 130
NO_EXECUTOR = (
    "{} has no executor for this job yet: its workers are busy, have less memory or fewer cores "
    "than requested (spark.executor.memory defaults to 1g), or executors exit at once"
)
INJECTED_PARAMETERS = ("spark", "tell")  # passed by this module, not by the command line

Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="URL of a Spark cluster. [default: local[*]]"),
]
LogLevel = Annotated[
    str,
    typer.Option("--spark-log", metavar="LEVEL", help="Level of Spark's own log: WARN, INFO."),
]


def register(root: typer.Typer, name: str, help_line: str) -> None:
    from polybus.spark.pipelines import PIPELINES

    group = typer.Typer()
    for function, pipeline in PIPELINES.items():
        verb, about = function.replace("_", "-"), (pipeline.__doc__ or "").strip()
        group.command(verb, help=about, epilog=EXIT_CODES)(command_of(verb, pipeline))
    root.add_typer(group, name=name, help=help_line, epilog=EXIT_CODES)


def command_of(verb: str, pipeline: Callable[..., Summary]) -> Callable[..., int]:
    """Return a function for Typer with the parameters of the pipeline and of the session."""

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
    del command.__wrapped__  # or Typer would use its signature
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
