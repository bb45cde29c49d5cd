"""Tables for people: bold headings on a terminal, plain columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polybus.cli.terminal import drawing_stream


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    columns = [escape_control(name) for name in columns]
    cells = [[escape_control(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells)
    else:
        _print(columns, cells)


def print_fields(
    columns: Sequence[str], short: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Print all columns to a pipe; a terminal gets those of `short`, rounded.

    `short` maps headings to columns; a missing value is printed as an empty cell.
    """
    if sys.stdout.isatty():
        cells = [[row.get(name, "") for name in short.values()] for row in rows]
        rounded = [[round_count(v) if isinstance(v, int) else v for v in row] for row in cells]
        print_table(list(short), rounded)
    else:
        print_table(columns, [[row.get(name, "") for name in columns] for row in rows])


def round_count(count: int) -> str:
    """Round a count for display: 1234567 → 1.2M."""
    size: float = count
    for suffix in ("", "k", "M", "G"):
        if size < 1000:
            return f"{size:.1f}{suffix}" if suffix and size < 100 else f"{size:.0f}{suffix}"
        size /= 1000
    return f"{size:.0f}T"


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun: `1 shard`, `2 shards`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def escape_control(value: Any) -> str:
    """Escape control characters: text of a peer must not control the terminal."""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _draw(columns: Sequence[str], cells: list[list[str]]) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1))
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(file=drawing_stream(sys.stdout))
    # A truncated number would be a wrong number, so the terminal wraps the line instead.
    full = zip(columns, *cells, strict=True)
    console.width = max(console.width, sum(max(map(cell_len, column)) + 2 for column in full))
    console.print(table)


def _print(columns: Sequence[str], cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())
