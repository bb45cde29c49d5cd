"""`polybus config check|show`: check the configuration, or show each value and its source."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from polybus.cli import flags
from polybus.model.access_rule import Rule
from polybus.server.config import LoadedSettings, load
from polybus.server.folders import data_folder
from polybus.server.program import check_files, plan_serve


def register(root: typer.Typer, name: str, help_line: str) -> None:
    group = typer.Typer()
    group.command("check", help="Check whether a bus would start with this configuration.")(check)
    group.command("show", help="Show every setting with its value and source.")(show)
    root.add_typer(group, name=name, help=help_line)


File = Annotated[Path | None, typer.Argument(metavar="FILE", help="TOML file.")]


def check(file: File = None, config: flags.Config = None) -> None:
    loaded = load(file or config, os.environ)
    plan_serve(loaded, os.environ)
    check_files(loaded)
    _warn(loaded)
    place = file or config or os.environ.get("POLYBUS_CONFIG") or "defaults and environment"
    print(f"{place}: ok")


def show(file: File = None, config: flags.Config = None, as_json: flags.Json = False) -> None:
    loaded = load(file or config, os.environ)
    # The default data folder depends on the user and the environment.
    data = loaded.settings.data or data_folder(os.environ, os.getuid())
    loaded = replace(loaded, settings=replace(loaded.settings, data=data))
    _warn(loaded)
    if as_json:
        settings = {
            key.dotted: {"value": _plain(value), "source": source}
            for key, value, source in loaded.rows()
        }
        print(json.dumps(settings, indent=2))
        return
    # TOML that can be pasted into a file, with the source as a comment.
    section = ""
    for key, value, source in loaded.rows():
        if key.section != section:
            section = key.section
            print(f"\n[{section}]")
        unset = "" if value is not None else "# "
        print(f"{f'{unset}{key.name} = {_toml(value)}':<48} # {source}")


def _warn(loaded: LoadedSettings) -> None:
    for warning in loaded.warnings:
        print(f"polybus: warning: {warning}", file=sys.stderr)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path | Rule) else value


def _toml(value: Any) -> str:
    """Return the value as TOML: JSON's syntax except for objects."""
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(key)} = {_toml(its)}" for key, its in value.items())
        return f"{{{inner}}}"
    return "" if value is None else json.dumps(_plain(value), ensure_ascii=False)
