"""The conformance suite of the store: small checks that every engine must pass.

    from polybus.testing import conformance

    engine = conformance.Engine(open=lambda wall_ns: MyStore(wall_ns=wall_ns))
    for check in conformance.checks(engine):
        check(engine)

A check opens its own stores, closes them, and raises AssertionError if the engine breaks the
contract. Run each check as a separate test, so that the failed ones show the extent of a
fault. An engine that persists data sets `reopen` and gets `reopen_checks` as well.
"""

from __future__ import annotations

from polybus.testing.conformance import (
    close_checks,
    commit_checks,
    find_checks,
    maintenance_checks,
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
    maintenance_checks,
    close_checks,
)


def checks(engine: Engine) -> list[Check]:
    """Return the checks that apply to an engine."""
    subjects = SUBJECTS if engine.reopen is None else (*SUBJECTS, reopen_checks)
    return [
        value
        for subject in subjects
        for name, value in vars(subject).items()
        if name.startswith("check_")
    ]


def name_of(check: Check) -> str:
    """Return module and check, such as "stamp_checks-dense_counters_leave_no_gap"."""
    subject = check.__module__.rpartition(".")[2]
    return f"{subject}-{check.__name__.removeprefix('check_')}"
