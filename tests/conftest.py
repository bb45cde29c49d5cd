"""Rules that hold for every test.

Skips. A test that cannot run here (no second user, no redis-server) may skip on a
laptop. With CI=true a skip is a failure, unless tests/allowed_skips.txt lists the
test: a suite that quietly stopped testing something looks just like a green one.

Sabotage. A fault test proves little until it was seen to fail. It names patches that break
the property it guards; `pytest --sabotage` applies each and requires that the test fails by
the assertion that it names (tests/rig/sabotage/plugin.py).

Sharing. `make test` runs several processes at once, which take the tests file by file. The
tests in Spark's folder count as one file: they share a session, and its start takes longer
than most of them. Tests that take minutes start first. Otherwise one process would run them
alone at the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.rig import warm_bus

pytest_plugins = ["tests.rig.sabotage.plugin"]

# Taken as one.
TOGETHER = "tests/spark/"
LONGEST = (
    TOGETHER,
    "tests/faults/test_spark_kills.py",
    "tests/faults/test_pipeline_kills.py",
    "tests/faults/test_archive_kills.py",
    "tests/interop/test_word_count_example.py",
    "tests/unit/testing/test_mutant_sample.py",
)
ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")

# On a shared machine any single example may be slow; hangs are pytest-timeout's.
# In CI the same commit always sees the same examples.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)


def in_ci() -> bool:
    return os.environ.get("CI") == "true"


settings.load_profile("ci" if in_ci() else "local")


def pytest_configure() -> None:
    """Buses start warm. Programs can be interrupted, also if a script in the background runs us."""
    warm_bus.use()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# --- skips -------------------------------------------------------------------


def allowed_skips() -> tuple[str, ...]:
    lines = (line.partition("#")[0].strip() for line in ALLOWED_SKIPS.read_text().splitlines())
    return tuple(line for line in lines if line)


Report = pytest.TestReport | pytest.CollectReport


def forbid_skip(report: Report) -> Report:
    """Turn a skip into a failure that keeps the reason, if it is one that counts."""
    was_xfail = hasattr(report, "wasxfail")
    if not (in_ci() and report.skipped) or was_xfail or report.nodeid.startswith(allowed_skips()):
        return report
    report.outcome = "failed"
    report.longrepr = f"skipped in CI, and not in {ALLOWED_SKIPS.name}: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Report, Report]:
    return forbid_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Report, Report]:
    return forbid_skip((yield))


# --- sharing -----------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: longest_first(item.nodeid))


def longest_first(nodeid: str) -> int:
    return next((n for n, long in enumerate(LONGEST) if nodeid.startswith(long)), len(LONGEST))


class Sharing(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return TOGETHER if scope.startswith(TOGETHER) else scope


@pytest.hookimpl(optionalhook=True)  # known only to xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Sharing | None:
    return Sharing(config, log) if config.getvalue("dist") == "loadfile" else None
