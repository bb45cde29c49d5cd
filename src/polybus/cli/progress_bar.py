"""Progress of a long command: a bar on a terminal, else a line every few seconds.

Progress goes to stderr so that stdout can be piped. A command that ends within seconds
prints nothing to a log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polybus.cli.terminal import drawing_stream

# Called with the done and the total bytes, at any rate.
Progress = Callable[[int, int], None]

LINE_EVERY_S = 5.0  # keeps the log of a command that runs for an hour readable
UNIT = 1000


@contextmanager
def show_progress(title: str) -> Iterator[Progress]:
    """Show progress under a title. Yields the function that the block reports to."""
    if sys.stderr is not None and sys.stderr.isatty():
        with _bar(title) as show:
            yield show
    else:
        yield _lines(title)


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(file=drawing_stream(sys.stderr))
    # Redirected output would pass by the filter of the terminal.
    with Bars(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _lines(title: str, clock: Callable[[], float] = time.monotonic) -> Progress:
    printed_s = clock()

    def show(done: int, total: int) -> None:
        nonlocal printed_s
        now_s = clock()
        if now_s - printed_s >= LINE_EVERY_S:
            printed_s = now_s
            print(
                f"{title}: {format_size(done)} of {format_size(total)}", file=sys.stderr, flush=True
            )

    return show


def format_size(count: int) -> str:
    """1234567 → 1.2 MB."""
    amount: float = count
    for unit in ("B", "kB", "MB", "GB"):
        if amount < UNIT:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= UNIT
    return f"{amount:.1f} TB"
