"""`polybus gsb`: its commands are in the dialect's own folder."""

from __future__ import annotations

import typer


def register(root: typer.Typer, name: str, help_line: str) -> None:
    from polybus.dialects.gsb import cli

    root.add_typer(cli.group(), name=name, help=help_line, epilog=cli.EXIT_CODES)
