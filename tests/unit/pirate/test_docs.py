"""The guide matches the code, and the example runs."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from polybus import errors, pirate
from polybus.dialects.pirate import cli as command
from polybus.dialects.pirate.client.pirate_blocking import BlockingClient
from polybus.dialects.pirate.client.pirate_options import Order
from polybus.dialects.pirate.shell import USAGE

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "pirate.md").read_text()


def rows() -> list[list[str]]:
    """The first two cells of every row of every table."""
    found = re.findall(r"^\| ([^|]+?) \| ([^|]*?) \|", GUIDE, re.MULTILINE)
    return [list(cells) for cells in found]


def words(cells: list[str]) -> set[str]:
    return set(re.findall(r"\w+", cells[0]))


def test_guide_lists_every_option():
    documented = {cells[0].strip("`"): cells[1] for cells in rows()}
    for field in dataclasses.fields(pirate.ClientOptions):
        assert documented[field.name] == str(field.default), field.name


def test_guide_lists_every_method():
    calls = set().union(*map(words, rows()))
    public = {name for name in vars(BlockingClient) if not name.startswith("_")}
    assert public - {"open"} <= calls


def test_guide_lists_orders_commands_and_exit_codes():
    first = [cells[0].strip("`") for cells in rows()]
    assert {str(order) for order in Order} <= set(first)
    for verb in USAGE:
        assert any(re.search(rf"\b{verb}\b", cell) for cell in first), verb
    for code in re.findall(r"^  (\d+) ", command.EXIT_CODES, re.MULTILINE):
        assert any(code in re.findall(r"\d+", cell) for cell in first), code


def test_errors_named_in_the_guide_exist():
    table = GUIDE.partition("## Errors")[2].partition("## Keys")[0]
    named = re.findall(r"`([A-Z]\w+)`", table)
    assert named
    for name in named:
        assert hasattr(errors, name), name


def test_example_reads_missed_messages_once(endpoint):
    for start in (0, 3):
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "pirate.py"), endpoint],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        ids = range(start + 1, start + 4)
        assert done.stdout.splitlines() == [
            f"subscribed after {start}",
            *(f"put {number}" for number in ids),
            *(f"read {number} news {number - start - 1}" for number in ids),
        ]
