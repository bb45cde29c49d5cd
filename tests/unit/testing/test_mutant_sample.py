"""A sample of the mutants, another one for each commit: their tests must notice each.

`make mutants` runs all of them. Mutants of compiled files are not in the sample: each would
need a build of its own.

It runs in `make soak` until a whole run of `make mutants` has no survivor: a mutant that
survives today would fail the commit that happens to draw it.
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

pytestmark = pytest.mark.soak

COUNT = 12
TIMEOUT_S = 150.0
PYTEST = ("-x", "-q", "--tb=line", "-n", "0", "-p", "tests.mutants.profile")


Suites = Mapping[str, tuple[str, ...]]


def population() -> list[tuple[str, Patch, Suites]]:
    """Return (module, mutant, its tests) of all mutants that may be in the sample."""
    found = []
    for file in sorted((ROOT / "tests" / "mutants").glob("*.py")):
        module = import_module(f"tests.mutants.{file.stem}")
        suites = getattr(module, "SUITES", None)
        if suites is not None:
            python = [one for one in module.ALL if one.file.endswith(".py")]
            own = [one for one in python if not one.file.startswith("tests/")]
            found += [(file.stem, one, suites) for one in own]
    return found


@pytest.mark.timeout(2 * TIMEOUT_S + 30)
@pytest.mark.parametrize(
    ("module", "mutant", "suites"),
    [
        pytest.param(*chosen, id=f"{chosen[0]}-{chosen[1].name}".replace(" ", "_"))
        for chosen in sample(population(), COUNT, "mutants")
    ],
)
def test_sampled_mutant_is_noticed(
    module: str,
    mutant: Patch,
    suites: Suites,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    record_property(SAMPLED, f"mutant {module}: {mutant.name}")
    copy = patched_copy([mutant])
    outcome = ""
    for suite in suites.values():  # the quick one first
        outcome = run_suite(suite, copy, tmp_path)
        if is_caught(outcome):
            break
    assert is_caught(outcome), f"{mutant.file}: {mutant.name}: {outcome}"


def run_suite(suite: tuple[str, ...], copy: Path, cache: Path) -> str:
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
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"hung for {TIMEOUT_S:g} s"  # which a mutant may cause, so it is noticed
    return verdict(done.returncode, done.stdout + done.stderr)
