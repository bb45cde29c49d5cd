"""The verdict of a trial on a mutant, and whether it proves anything.

A mutant is caught by a test that fails, hangs or dies. Three answers prove nothing:

    survived     the tests passed
    out of date  the mutant could not be applied, or not be compiled
    not tried    no test was run: pytest was interrupted, broke down, was called wrongly,
                 could not load its conftest or a test file, or found nothing to run. Most
                 often the mutant cannot be imported, which shows nothing about the tests

Each of them fails the run.
"""

from __future__ import annotations

import re
import signal

import pytest

GREEN = "survived"
STALE = "out of date"
UNTRIED = "not tried"

TAIL = 500  # characters of pytest's last words


def verdict(code: int, output: str) -> str:
    """`code` is pytest's own, or less than 0: the signal that it died of."""
    if code == pytest.ExitCode.OK:
        return GREEN
    if code < 0:
        return _died(-code, output)
    if code != pytest.ExitCode.TESTS_FAILED:
        return f"{UNTRIED}: pytest's exit code {code}: {output[-TAIL:]}"
    failed = re.search(r"^(?:FAILED|ERROR) (?:[^\s:]*/)?(\S+)", output, re.MULTILINE)
    if failed is None:
        return f"failed: {output[-TAIL:]}"
    if "::" not in failed[1]:  # with -x pytest exits with TESTS_FAILED here, too
        return f"{UNTRIED}: {failed[1]} cannot be imported: {output[-TAIL:]}"
    return failed[1]


def _died(number: int, output: str) -> str:
    if number in (signal.SIGXCPU, signal.SIGALRM):
        return "hung"
    where = re.search(r"(test_\w+\.py)\", line \d+ in (test_\w+)", output)
    last = "::".join(where.groups()) if where else "?"
    return f"{last} died of signal {number}"


def is_caught(said: str) -> bool:
    return not said.startswith((GREEN, STALE, UNTRIED))
