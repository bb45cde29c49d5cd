"""Rows for people: headings in bold on a terminal, plain columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any


def show(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    cells = [[printable(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells)
    else:
        _print(columns, cells)


def rounded(count: int) -> str:
    """1234567 → 1.2M: for an eye that compares, not for one that adds."""
    size: float = count
    for suffix in ("", "k", "M", "G"):
        if size < 1000:
            return f"{size:.1f}{suffix}" if suffix and size < 100 else f"{size:.0f}{suffix}"
        size /= 1000
    return f"{size:.0f}T"


def printable(value: Any) -> str:
    """Control characters of a peer must not reach the terminal."""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _draw(columns: Sequence[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1))
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def _print(columns: Sequence[str], cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())
