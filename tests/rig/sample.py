"""The sample of sabotages and mutants that `make test` runs: another one for each commit.

A whole run of all patches takes an hour (`make sabotage mutants`). The sample finds a test
that has stopped noticing within a few commits. It depends on the commit alone, so that every
process of a run, and a second run, see the same one.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from tests.rig.patching import ROOT

T = TypeVar("T")

SAMPLED = "sampled"  # the property of a test report that names its patch


@cache
def commit() -> str:
    """Return the commit that is checked out, or $POLYBUS_SAMPLE, which repeats another sample."""
    if chosen := os.environ.get("POLYBUS_SAMPLE"):
        return chosen
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def sample(population: Sequence[T], count: int, purpose: str) -> list[T]:
    """Return `count` members, chosen by the commit and the purpose, in their own order."""
    chance = random.Random(f"{commit()} {purpose}")
    chosen = chance.sample(range(len(population)), min(count, len(population)))
    return [population[at] for at in sorted(chosen)]
