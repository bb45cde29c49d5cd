"""Every `polybus pipeline …` that a guide shows can be typed as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from polybus.cli.main import build

DOCS = Path(__file__).parents[3] / "docs" / "guides"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PIPELINE = "polybus pipeline "


def shown() -> list[tuple[str, str]]:
    found = []
    for path in sorted(DOCS.glob("*.md")):
        for block in BLOCK.findall(path.read_text()):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(path.name, line) for line in lines if PIPELINE in line]
    return found


def words(line: str) -> list[str]:
    arguments = shlex.split(line, comments=True)
    start = next(n for n, word in enumerate(arguments) if word.endswith("polybus"))
    return [word for word in arguments[start + 2 :] if word != "&"]


def test_guides_show_every_pipeline():
    command = typer.main.get_command(build(["pipeline"]))
    known = set(command.commands["pipeline"].commands)  # type: ignore[attr-defined]
    assert {words(line)[0] for _, line in shown()} == known


@pytest.mark.parametrize("line", [line for _, line in shown()])
def test_positions_can_be_parsed(line):
    verb, *rest = words(line)
    command = typer.main.get_command(build(["pipeline"]))
    found = command.commands["pipeline"].commands[verb]  # type: ignore[attr-defined]
    found.make_context(verb, rest)
