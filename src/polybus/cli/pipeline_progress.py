"""Progress and summary of a pipeline: rows, rate and lag."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polybus.cli.progress_bar import LINE_EVERY_S
from polybus.cli.terminal import drawing_stream
from polybus.cli.text_table import print_table, round_count

if TYPE_CHECKING:
    from polybus.spark.pipelines import Progress, Summary

OnProgress = Callable[["Progress"], None]


@contextmanager
def show_pipeline(verb: str) -> Iterator[OnProgress]:
    """Show progress on stderr: a bar on a terminal, else a line every few seconds."""
    if sys.stderr is not None and sys.stderr.isatty():
        with _bar(verb) as on_progress:
            yield on_progress
    else:
        yield _lines(verb)


@contextmanager
def _bar(verb: str) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    status = TextColumn("{task.fields[status]}")
    console = Console(file=drawing_stream(sys.stderr))
    # Redirected output would pass by the filter of the terminal.
    with Bars(
        *columns,
        status,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bars:
        task = bars.add_task(verb, total=None, status="Spark starts")

        def on_progress(progress: Progress) -> None:
            total = None if progress.lag is None else progress.rows + progress.lag
            bars.update(
                task,
                completed=progress.rows,
                total=total,
                status=format_pipeline_progress(progress),
            )

        yield on_progress


def _lines(verb: str, clock: Callable[[], float] = time.monotonic) -> OnProgress:
    printed_s = clock()

    def on_progress(progress: Progress) -> None:
        nonlocal printed_s
        if clock() - printed_s >= LINE_EVERY_S:
            printed_s = clock()
            print(f"{verb}: {format_pipeline_progress(progress)}", file=sys.stderr, flush=True)

    return on_progress


def format_pipeline_progress(progress: Progress) -> str:
    lag = "" if progress.lag is None else f", {round_count(progress.lag)} wait"
    return f"{round_count(progress.rows)} rows, {round_count(round(progress.rows_per_s))}/s{lag}"


def print_summary(verb: str, summary: Summary) -> None:
    if summary.table is not None and summary.table.rows:
        print_table(*summary.table)
        print()
    facts = {"rows": summary.rows, **summary.facts, "seconds": round(summary.seconds, 1)}
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
        for name, value in facts.items()
    ]
    print_table((verb, ""), rows)
