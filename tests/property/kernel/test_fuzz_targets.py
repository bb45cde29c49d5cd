"""The fuzz targets' seeds, and a few thousand steps from them, without instruments.

`make fuzz` climbs for minutes on a kernel that counts its branches; this is the
small change: it shows that the targets work, and finds shallow defects.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.rig.fuzz.loop import load_target
from tests.rig.fuzz.mutation import Mutator

TARGETS = sorted((Path(__file__).parents[2] / "fuzz").glob("fuzz_*.py"))
STEPS = 600  # `make fuzz` runs each target for FUZZ_SECONDS
PROGRAM_BYTES = 300


def named(path: Path) -> str:
    return path.stem


def test_there_are_targets() -> None:
    assert {"fuzz_fanout", "fuzz_rqueue"} <= set(map(named, TARGETS))


@pytest.mark.parametrize("path", TARGETS, ids=named)
def test_the_seeds_hold(path: Path) -> None:
    target = load_target(path)
    assert target.seeds
    for seed in (b"", *target.seeds):
        target.run(seed)


@pytest.mark.parametrize("path", TARGETS, ids=named)
def test_mutated_seeds_keep_the_invariant(path: Path) -> None:
    target, chance = load_target(path), Random(1)
    mutator = Mutator(target.seeds, target.words, max_bytes=4096)
    for _ in range(STEPS):
        target.run(mutator.mutate(chance.choice(target.seeds), chance))


@pytest.mark.parametrize("path", TARGETS, ids=named)
def test_random_bytes_keep_the_invariant(path: Path) -> None:
    target, chance = load_target(path), Random(2)
    for _ in range(STEPS // 3):
        target.run(chance.randbytes(PROGRAM_BYTES))
