"""The pages on configuration and running agree with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from polybus.bus.dialect_registry import installed_dialects
from polybus.cli.exit_status import EXIT_CODES
from polybus.server.config import load, setting_bounds, setting_keys

DOCS = Path(__file__).parents[3] / "docs"
DEFAULTS = {key.dotted: value for key, value, _ in load().rows()}


def documented() -> dict[str, str]:
    """Dotted key → its default, as the tables of the page have them."""
    found, section = {}, ""
    for line in (DOCS / "configuration.md").read_text().splitlines():
        if heading := re.match(r"### (?:`\[(\w+)\]`)?", line):
            section = heading[1] or ""
        elif row := re.match(r"\| `(\w+)` \| ([^|]+) \|", line):
            found[f"{section}.{row[1]}".lstrip(".")] = row[2].strip("` ")
    return found


def test_page_lists_every_setting_and_no_other():
    assert sorted(documented()) == sorted(setting_keys())


@pytest.mark.parametrize(
    "dotted", sorted(set(setting_keys()) - {"data", "tls.certificate", "tls.key"})
)
def test_page_has_the_defaults_of_the_code(dotted):
    assert json.loads(documented()[dotted]) == json.loads(json.dumps(DEFAULTS[dotted]))


RANGE = r"(\d+) to (\d+(?:\.\d+)?)"


def test_page_has_the_bounds_of_the_code():
    """Of every row that states them, as `1 to 512` or `At least 65536`."""
    page, section, differing = (DOCS / "configuration.md").read_text(), "", []
    for line in page.splitlines():
        if heading := re.match(r"### (?:`\[(\w+)\]`)?", line):
            section = heading[1] or ""
        elif row := re.match(
            r"\| `(\w+)` \| [^|]+ \| (?:(\d+) to (\d+(?:\.\d+)?)|At least (\d+))\b", line
        ):
            dotted = f"{section}.{row[1]}".lstrip(".")
            stated = float(row[2] or row[4]), float(row[3] or "inf")
            if stated != setting_bounds().get(dotted):
                differing.append((dotted, stated, setting_bounds().get(dotted)))
    assert differing == []


def test_page_lists_dialects_and_exit_codes():
    page = (DOCS / "guides" / "running.md").read_text()
    for row in installed_dialects().listening:
        schemes = ", ".join(f"`{scheme}`" for scheme in row.schemes)
        defaults = " and ".join(f"`{default}`" for default in row.default_addresses)
        assert f"| `{row.name}` | {defaults} | {schemes} |" in page
    for code in {code for _, code in EXIT_CODES} | {0, 130}:
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE)
