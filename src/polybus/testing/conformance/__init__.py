"""The contract of the store as small checks that every engine passes.

    from polybus.testing import conformance

    engine = conformance.Engine(open=lambda wall_ns: MyStore(wall_ns=wall_ns))
    for check in conformance.checks(engine):
        check(engine)

A check opens stores of its own, closes them, and fails by an AssertionError; run
each as a test of its own, so that one fault shows what it touches. An engine that
outlives its process gives `reopen` as well, and gets the checks of `reopening`.
"""

from __future__ import annotations

from types import ModuleType

from polybus.testing.conformance import (
    close_checks,
    commit_checks,
    find_checks,
    read_checks,
    record_checks,
    reopen_checks,
    stage_checks,
    stamp_checks,
    topic_checks,
    trim_checks,
    wait_checks,
)
from polybus.testing.conformance.kit import Check, Clock, Engine

__all__ = ["Check", "Clock", "Engine", "checks", "name_of"]

SUBJECTS = (
    topic_checks,
    commit_checks,
    stamp_checks,
    stage_checks,
    record_checks,
    read_checks,
    find_checks,
    trim_checks,
    wait_checks,
    close_checks,
)


def checks(engine: Engine) -> list[Check]:
    """All that can be asked of this engine."""
    subjects = SUBJECTS if engine.reopen is None else (*SUBJECTS, reopen_checks)
    return [check for subject in subjects for check in _checks_of(subject)]


def name_of(check: Check) -> str:
    """Subject and check: "stamps-dense_counters_leave_no_gap"."""
    subject = check.__module__.rpartition(".")[2]
    return f"{subject}-{check.__name__.removeprefix('check_')}"


def _checks_of(subject: ModuleType) -> list[Check]:
    return [value for name, value in vars(subject).items() if name.startswith("check_")]
