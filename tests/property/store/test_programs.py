"""Random programs: each engine must match the model of the contract at every step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.memory.memory_store import MemoryStore
from polybus.testing.conformance import Clock
from tests.property.store.programs import Step, programs
from tests.property.store.subject import Subject
from tests.property.store.trial import Trial

EXAMPLES = 60
SOAK_EXAMPLES = 3_000

BEGINNING: list[Step] = [
    ("open_producer", 0, True, 2),
    ("open_producer", 1, False, 2),
    ("create", 0, 2),
    ("open_stage",),
]

# An engine behaves the same on disk and in memory, where syncs are faster.
FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


@contextmanager
def memory(clock: Clock) -> Generator[Subject]:
    with MemoryStore(wall_ns=clock) as store:
        yield Subject("memory", store)


@contextmanager
def lmdb(clock: Clock) -> Generator[Subject]:
    def reopen() -> LmdbStore:
        subject.store.close()
        return LmdbStore(folder, wall_ns=clock)

    def tidy() -> None:
        assert isinstance(subject.store, LmdbStore)
        subject.store.reblock()

    folder = Path(tempfile.mkdtemp(prefix="polybus-", dir=FOLDER))
    subject = Subject("lmdb", LmdbStore(folder, wall_ns=clock), reopen, tidy)
    try:
        yield subject
    finally:
        subject.store.close()
        shutil.rmtree(folder)


@settings(max_examples=EXAMPLES)
@given(programs)
def test_memory_store_matches_the_model(program: Sequence[Step]) -> None:
    clock = Clock()
    with memory(clock) as subject:
        Trial(clock, [subject]).run([*BEGINNING, *program])


@settings(max_examples=EXAMPLES)
@given(programs)
def test_lmdb_store_matches_the_model(program: Sequence[Step]) -> None:
    clock = Clock()
    with lmdb(clock) as subject:
        Trial(clock, [subject]).run([*BEGINNING, *program])


@pytest.mark.soak
@settings(max_examples=SOAK_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(programs)
def test_engines_match_the_model_over_long_programs(program: Sequence[Step]) -> None:
    clock = Clock()
    with memory(clock) as first, lmdb(clock) as second:
        Trial(clock, [first, second]).run([*BEGINNING, *program])
