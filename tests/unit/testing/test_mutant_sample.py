"""A sample of the mutants, another one for each commit: their tests must notice each.

`make mutants` runs all of them. Mutants of compiled files are not in the sample, because each
would need a build of its own. `make test` draws from suites that had a whole run without a
survivor (PROVEN): elsewhere a mutant that survives today would fail the commit that happens
to draw it. `make soak` draws more, from all suites.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from tests.mutants.verdicts import is_caught, verdict
from tests.rig.patching import ROOT, Patch, import_path, patched_copy
from tests.rig.sample import SAMPLED, sample

# Not pirate_client and gsb_network: nearly all of their mutants need suites of half a minute.
PROVEN = {
    *("bus", "fdq", "fdq_consumer", "fdq_producer", "freud", "groups"),
    *("gsb", "pirate", "policy", "port", "writer"),
}
COUNT = 6
SOAK_COUNT = 12
# A mutant that hangs its tests is noticed. These bound a suite, of which most need a few seconds.
TIMEOUT_S = 45.0
SOAK_TIMEOUT_S = 150.0
MOST_SUITES = 3
PYTEST = ("-x", "-q", "--tb=line", "-n", "0", "-p", "tests.mutants.profile")

Suites = Mapping[str, tuple[str, ...]]
Member = tuple[str, Patch, Suites]


def population(only: set[str] | None = None) -> list[Member]:
    """Return (module, mutant, its tests) of all mutants that may be in the sample."""
    found = []
    for file in sorted((ROOT / "tests" / "mutants").glob("*.py")):
        module = import_module(f"tests.mutants.{file.stem}")
        suites = getattr(module, "SUITES", None)
        if suites is not None and (only is None or file.stem in only):
            python = [one for one in module.ALL if one.file.endswith(".py")]
            own = [one for one in python if not one.file.startswith("tests/")]
            found += [(file.stem, one, suites) for one in own]
    return found


def drawn(
    members: list[Member], count: int, timeout_s: float, *marks: pytest.MarkDecorator
) -> list[object]:
    """Return a sample as parameters of the test."""
    return [
        pytest.param(
            *member,
            timeout_s,
            id=f"{member[0]}-{member[1].name}".replace(" ", "_"),
            marks=[pytest.mark.timeout(MOST_SUITES * timeout_s + 30), *marks],
        )
        for member in sample(members, count, f"{count} mutants")
    ]


def test_proven_suites_exist():
    assert {module for module, _, _ in population(PROVEN)} == PROVEN


@pytest.mark.parametrize(
    ("module", "mutant", "suites", "timeout_s"),
    [
        *drawn(population(PROVEN), COUNT, TIMEOUT_S),
        *drawn(population(), SOAK_COUNT, SOAK_TIMEOUT_S, pytest.mark.soak),
    ],
)
def test_sampled_mutant_is_noticed(
    module: str,
    mutant: Patch,
    suites: Suites,
    timeout_s: float,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    outcome = run_suites(mutant, suites, tmp_path, timeout_s)
    record_property(SAMPLED, f"mutant {module}: {mutant.name}: {outcome}")
    assert is_caught(outcome), f"{mutant.file}: {mutant.name}: {outcome}"


def run_suites(mutant: Patch, suites: Suites, cache: Path, timeout_s: float) -> str:
    """Return the verdict of the first suite that notices the mutant, or of the last one."""
    assert len(suites) <= MOST_SUITES
    copy = patched_copy([mutant])
    outcome = ""
    for suite in suites.values():  # the quick one first
        outcome = run_suite(suite, copy, cache, timeout_s)
        if is_caught(outcome):
            break
    return outcome


def run_suite(suite: tuple[str, ...], copy: Path, cache: Path, timeout_s: float) -> str:
    command = [sys.executable, "-m", "pytest", *PYTEST, "-o", f"cache_dir={cache}"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    try:
        done = subprocess.run(
            [*command, "--hypothesis-profile", "mutants", *suite],
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": import_path(copy)},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"hung for {timeout_s:g} s"  # which a mutant may cause, so it is noticed
    return verdict(done.returncode, done.stdout + done.stderr)
