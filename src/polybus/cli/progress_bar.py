"""How far a long command has come: a bar on a terminal, a line now and then elsewhere.

It goes to stderr, so that what a command answers can be piped. A command that is done
within a moment shows nothing in a log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with what is done and what there is in all, in bytes, as often as one likes.
Progress = Callable[[int, int], None]

LINE_EVERY_S = 5.0  # a log of an hour's work stays readable
UNIT = 1000


@contextmanager
def show_progress(title: str) -> Iterator[Progress]:
    """While the block runs, what it tells of its progress is shown under this title."""
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
    with Bars(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _lines(title: str, clock: Callable[[], float] = time.monotonic) -> Progress:
    said_s = clock()

    def show(done: int, total: int) -> None:
        nonlocal said_s
        now_s = clock()
        if now_s - said_s >= LINE_EVERY_S:
            said_s = now_s
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
