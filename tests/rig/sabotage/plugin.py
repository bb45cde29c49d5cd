"""`pytest --sabotage`: every test that names a sabotage must fail under it, for the right reason.

    @pytest.mark.sabotage("stamps-off", expects="[1-9][0-9]* twice")
    def test_everything_arrives_once(): ...

For each name the test runs in a pytest of its own, which imports a copy of the package with
that patch applied, and so do all processes that it starts: PYTHONPATH leads to the copy. The
test must fail in its call phase, and the message of the failed assertion must match `expects`,
a regular expression (re.search). A test that passes, fails in a fixture, fails with another
message or hangs does not notice the sabotage.

Where a sabotage shows only if a random kill falls at the right moment, `tries=3` runs the test
again while it passes.

`--sabotage-sample N` adds N of these trials to an ordinary run (tests/rig/sample.py). Soak
tests and the kill tests of Spark, which take minutes, are left out of the sample.

A test for which a sabotaged run of full length would take too long asks the fixture
`sabotaged` for its kind of run, and may do fewer or more rounds with the same assertions.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.rig.patching import import_path, patched_copy
from tests.rig.sabotage import NAMES, patch_of
from tests.rig.sample import SAMPLED, commit, sample

HANG_S = 7200.0  # the child has pytest's own timeouts; this is for a child that ignores them
TAIL = 4000  # characters of the child's output that a failure shows
# Each starts several Spark drivers.
SLOW = tuple(f"tests/faults/test_{area}_kills.py" for area in ("spark", "archive", "pipeline"))
PASSES = "the test passes under it"
NOT_INHERITED = ("PYTEST_XDIST", "PYTEST_CURRENT_TEST")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sabotage", action="store_true", help="run fault tests that must turn red")
    parser.addoption(
        "--sabotage-sample", metavar="N", type=int, default=0, help="add N tests that must turn red"
    )
    parser.addoption("--sabotaged", metavar="FILE", help="used by --sabotage for its children")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--sabotaged")
    if file:
        config.pluginmanager.register(Recorder(Path(file)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sabotages and mutants of the sample. Reports carry them from every process."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind)]
    names = sorted(
        str(value)
        for report in reports
        if report.when == "call"
        for key, value in report.user_properties
        if key == SAMPLED
    )
    if names:
        terminalreporter.write_line(f"sample of {len(names)} patches, by commit {commit()[:12]}:")
        for name in names:
            terminalreporter.write_line(f"  {name}")


@pytest.fixture
def sabotaged(request: pytest.FixtureRequest) -> bool:
    """Return whether this run must fail; then a long test may stop early."""
    return request.config.getoption("--sabotaged") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in names_of(item):
            if name not in NAMES:
                raise pytest.UsageError(f"{item.nodeid}: there is no sabotage {name!r}")
    if not config.getoption("--sabotage"):
        if count := config.getoption("--sabotage-sample"):
            items.extend(sampled_trials(items, count))
        return
    others = [item for item in items if item.get_closest_marker("sabotage") is None]
    config.hook.pytest_deselected(items=others)
    items[:] = [trial for item in items for trial in trials_of(item)]


def sampled_trials(items: list[pytest.Item], count: int) -> list[Trial]:
    guarded = [item for item in items if item.get_closest_marker("sabotage") is not None]
    quick = [
        item
        for item in guarded
        if item.get_closest_marker("soak") is None and not item.nodeid.startswith(SLOW)
    ]
    trials = sorted(
        (trial for item in quick for trial in trials_of(item)), key=lambda one: one.nodeid
    )
    return sample(trials, count, "sabotages")


def names_of(item: pytest.Item) -> list[str]:
    return [name for marker in item.iter_markers("sabotage") for name in marker.args]


def trials_of(item: pytest.Item) -> Iterable[Trial]:
    assert item.parent is not None
    for marker in item.iter_markers("sabotage"):
        for name in marker.args:
            yield Trial.from_parent(
                item.parent, name=f"{item.name}[{name}]", test=item, sabotage=name, **marker.kwargs
            )


class Trial(pytest.Item):
    """One test under one sabotage."""

    def __init__(
        self,
        *,
        test: pytest.Item,
        sabotage: str,
        expects: str = "",
        tries: int = 1,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._test = test
        self._sabotage = sabotage
        self._expects = expects
        self._tries = tries
        self.own_markers.extend(test.own_markers)
        self.keywords.update({marker.name: marker for marker in test.own_markers})
        self.add_marker(pytest.mark.timeout(0), append=False)  # the child's counts

    def runtest(self) -> None:
        if self.config.getoption("--sabotage-sample"):
            self.user_properties.append((SAMPLED, f"sabotage {self.nodeid}"))
        if not self._expects:
            pytest.fail("the marker names no message: sabotage(name, expects=...)", pytrace=False)
        problem, output = self._try()
        for _ in range(1, self._tries):
            if problem == PASSES:
                problem, output = self._try()
        if problem is not None:
            text = f"{self._sabotage}: {problem}\n\n{output[-TAIL:]}"
            pytest.fail(text, pytrace=False)

    def _try(self) -> tuple[str | None, str]:
        """Return why the sabotage was not noticed, or None, and the output of the child."""
        with tempfile.TemporaryDirectory(prefix="polybus-sabotage-") as folder:
            file = Path(folder) / "reports"
            output = self._run_child(file)
            lines = file.read_text().splitlines() if file.exists() else []
        return judge([json.loads(line) for line in lines], self._expects), output

    def _run_child(self, reports: Path) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-m", ""]
        command += ["-o", f"cache_dir={reports.with_name('cache')}"]
        command += ["--sabotaged", str(reports), self._test.nodeid]
        timeout = self.config.getoption("timeout", None)
        if timeout is not None:
            command += ["--timeout", f"{timeout:g}"]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
        child = subprocess.Popen(
            command,
            cwd=self.config.rootpath,
            env={**inherited, "PYTHONPATH": import_path(copy_with(self._sabotage))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            return child.communicate(timeout=HANG_S)[0]
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        path, line, _ = self._test.reportinfo()
        return path, line, self.name


@cache
def copy_with(sabotage: str) -> Path:
    return patched_copy([patch_of(sabotage)])


# --- in the child


class Recorder:
    """Writes a line for each phase of the test."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        line = {"when": report.when, "outcome": report.outcome, "text": text}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


# --- the verdict


def judge(reports: list[dict[str, str]], expects: str) -> str | None:
    """Return why the sabotage was not noticed; None if it was. Skips if the child was skipped."""
    phases = {report["when"]: report for report in reports}
    for report in reports:
        if report["outcome"] == "skipped":
            pytest.skip(report["text"].removeprefix("Skipped: "))
    call = phases.get("call")
    if call is None:
        setup = phases.get("setup")
        text = f": {message_of(setup['text'])}" if setup is not None else ""
        return f"the test did not run{text}"
    if call["outcome"] != "failed":
        return PASSES
    message = message_of(call["text"])
    if re.search(expects, message) is None:
        return f"the test fails with another message than {expects!r}:\n{message}"
    return None


def message_of(text: str) -> str:
    """Return the lines that pytest marks as the error; all lines if it marks none."""
    lines = text.splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return "\n".join(marked or lines)
