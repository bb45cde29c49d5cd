"""The documentation of Freud agrees with the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from polybus import freud
from polybus.dialects.freud import cli
from polybus.dialects.freud.codec import Code, RequestType
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server.request_scanner import REASONS
from polybus.model.limits import MIB, QuotaLimits

DOCS = Path(__file__).parents[3] / "docs"
SPEC = (DOCS / "spec" / "freud.md").read_text()
GUIDE = (DOCS / "guides" / "freud.md").read_text()


def rows(page: str) -> list[list[str]]:
    """The first two cells of every row of every table."""
    return [list(found) for found in re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", page, re.MULTILINE)]


def test_spec_has_a_row_for_every_request_and_code():
    for kind in RequestType:
        words = kind.name.replace("_", " ").title()
        assert [str(int(kind)), words] in rows(SPEC)
    for code in Code:
        assert [str(int(code)), code.label] in rows(SPEC)


def test_spec_lists_the_reasons_in_the_order_of_their_checks():
    names = [cells[0].strip("`") for cells in rows(SPEC)]
    assert [name for name in names if name in REASONS] == list(REASONS)


@pytest.mark.parametrize("limits", [FreudLimits, QuotaLimits])
def test_spec_documents_every_limit(limits):
    for field in dataclasses.fields(limits):
        if field.name != "users":
            assert re.search(rf"^\| `\[\w+\] {field.name}` \|", SPEC, re.MULTILINE), field.name


def test_guide_documents_every_client_option():
    documented = {cells[0].strip("`"): cells[1] for cells in rows(GUIDE)}
    for field in dataclasses.fields(freud.ClientOptions):
        number, _, unit = documented[field.name].partition(" ")
        assert float(number) * (MIB if unit == "MiB" else 1) == field.default


def test_guide_documents_every_exit_code():
    codes = {str(code) for _, code in cli.EXIT_CODE_BY_ERROR if code} | {
        "0",
        str(cli.NOTHING_HAPPENED),
    }
    assert codes <= {cells[0] for cells in rows(GUIDE)}
