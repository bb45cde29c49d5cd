"""The rules of tests/conftest.py, tried on a small suite in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, longest_first
from tests.rig.patching import PACKAGE, import_path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SUITE = {
    "test_skips.py": """
import pytest

def test_that_runs():
    pass

def test_that_skips():
    pytest.skip("no such server here")

def test_that_may_skip():
    pytest.skip("cannot run there")
""",
    "test_module.py": """
import pytest
pytest.skip("no such package here", allow_module_level=True)
""",
    "test_guard.py": """
import inspect
import os
import subprocess
import sys
import pytest
from polybus.store.lmdb import write_txn

CHILD = "from polybus.store.lmdb import write_txn; print(write_txn.__file__)"

def writes():
    return "        return" not in inspect.getsource(write_txn.TransactionWriter.write)

@pytest.mark.sabotage("keep-nothing", "stamps-off", expects="commits are written")
def test_that_notices_one():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.stdout.strip() == write_txn.__file__
    assert writes(), "commits are written"

@pytest.mark.sabotage("keep-nothing", expects="commits are written")
def test_that_breaks_elsewhere():
    if not writes():
        raise OSError("no proof of anything")

@pytest.fixture
def store():
    assert writes(), "commits are written"

@pytest.mark.sabotage("keep-nothing", expects="commits are written")
def test_that_fails_in_a_fixture(store):
    pass

@pytest.mark.sabotage("keep-nothing")
def test_that_expects_nothing():
    assert writes(), "commits are written"

@pytest.mark.sabotage("keep-nothing", expects="commits are written")
def test_that_is_cut_short(sabotaged):
    assert sabotaged != writes(), "not told"
    assert not sabotaged, "commits are written"
""",
    "allowed_skips.txt": "# why not\ntest_skips.py::test_that_may  # no second machine\n",
    "pytest.ini": "[pytest]\nmarkers =\n    sabotage\n",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(CONFTEST, tmp_path)
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def outcomes(suite: Path, *options: str, ci: str = "false") -> tuple[dict[str, str], str]:
    """Test → how it ended, and everything that was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--continue-on-collection-errors", *options],
        cwd=suite,
        env={**os.environ, "CI": ci, "PYTHONPATH": import_path(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split() for line in done.stdout.splitlines() if re.match(r"test_\w+\.py::", line)]
    return {words[0].partition("::")[2]: words[1] for words in lines}, done.stdout


def test_on_a_laptop_a_skip_is_a_skip(suite: Path) -> None:
    ended, output = outcomes(suite)
    assert ended == {
        "test_that_runs": "PASSED",
        "test_that_skips": "SKIPPED",
        "test_that_may_skip": "SKIPPED",
        "test_that_notices_one": "PASSED",
        "test_that_breaks_elsewhere": "PASSED",
        "test_that_fails_in_a_fixture": "PASSED",
        "test_that_expects_nothing": "PASSED",
        "test_that_is_cut_short": "PASSED",
    }
    assert "6 passed, 3 skipped" in output


def test_in_ci_a_skip_fails_unless_listed(suite: Path) -> None:
    ended, output = outcomes(suite, ci="true")
    assert ended["test_that_runs"] == "PASSED"
    assert ended["test_that_skips"] == "FAILED"
    assert ended["test_that_may_skip"] == "SKIPPED"
    assert "no such server here" in output
    assert "ERROR test_module.py" in output
    assert "no such package here" in output


def test_under_sabotage_a_test_must_fail_by_its_assertion(suite: Path) -> None:
    ended, output = outcomes(suite, "--sabotage")
    assert ended == {
        "test_that_notices_one[keep-nothing]": "PASSED",
        "test_that_notices_one[stamps-off]": "FAILED",
        "test_that_breaks_elsewhere[keep-nothing]": "FAILED",
        "test_that_fails_in_a_fixture[keep-nothing]": "FAILED",
        "test_that_expects_nothing[keep-nothing]": "FAILED",
        "test_that_is_cut_short[keep-nothing]": "PASSED",
    }, output
    assert "stamps-off: the test passes under it" in output
    assert "keep-nothing: the test fails with another message" in output
    assert "keep-nothing: the test did not run: AssertionError: commits are written" in output


def test_sparks_folder_is_taken_by_one_process(suite: Path) -> None:
    for name in ("a/test_short.py", *(f"spark/test_{name}.py" for name in "abcd")):
        file = suite / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def test_one(): pass\ndef test_two(): pass\n")
    _, output = outcomes(suite, "-n2", "--dist=loadfile", "--no-loadscope-reorder", "tests")
    ran = re.findall(r"^\[(gw\d)\].*PASSED (tests/\w+/)", output, re.MULTILINE)
    assert len(ran) == 10, output
    assert len({who for who, where in ran if where == "tests/spark/"}) == 1


def test_tests_that_take_minutes_start_first() -> None:
    nodes = ["tests/faults/test_a.py::t", "tests/faults/test_spark_kills.py::t", "tests/spark/a::t"]
    assert sorted(nodes, key=longest_first) == nodes[::-1]
    for name in LONGEST:
        assert (CONFTEST.parents[1] / name).exists(), name
