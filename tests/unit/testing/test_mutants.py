"""Only tests that failed catch a mutant: tests that were not run prove nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.verdicts import GREEN, STALE, UNTRIED, is_caught, verdict

SUMMARY = "= short test summary info =\nFAILED tests/unit/test_x.py::test_y - assert 0\n"


def test_a_test_that_fails_catches():
    said = verdict(pytest.ExitCode.TESTS_FAILED, SUMMARY)
    assert said == "test_x.py::test_y"
    assert is_caught(said)


def test_tests_that_pass_do_not():
    assert verdict(pytest.ExitCode.OK, "") == GREEN
    assert not is_caught(GREEN)


@pytest.mark.parametrize(
    "code", [code for code in pytest.ExitCode if code > pytest.ExitCode.TESTS_FAILED]
)
def test_no_other_exit_code_catches(code):
    said = verdict(code, SUMMARY)
    assert said.startswith(f"{UNTRIED}: pytest's exit code {code.value}")
    assert not is_caught(said)


def test_a_conftest_that_cannot_be_loaded_does_not_catch(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("import nothing_of_this_name")
    (tmp_path / "test_x.py").write_text("def test_y(): raise AssertionError")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-c", "/dev/null", "test_x.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = verdict(done.returncode, done.stdout + done.stderr)
    assert "nothing_of_this_name" in said
    assert not is_caught(said)


def test_a_test_file_that_cannot_be_imported_does_not_catch():
    """With -x and several files pytest reports it as a test that failed."""
    output = "= short test summary info =\nERROR tests/unit/test_x.py\n! stopping !\n"
    said = verdict(pytest.ExitCode.TESTS_FAILED, output)
    assert said.startswith(f"{UNTRIED}: test_x.py cannot be imported")
    assert not is_caught(said)


def test_a_fixture_that_fails_catches():
    said = verdict(pytest.ExitCode.TESTS_FAILED, "ERROR tests/unit/test_x.py::test_y - OSError")
    assert said == "test_x.py::test_y"
    assert is_caught(said)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGXCPU, signal.SIGALRM])
def test_dying_and_hanging_catch(number):
    assert is_caught(verdict(-number, ""))


def test_a_mutant_out_of_date_is_not_caught():
    assert not is_caught(f"{STALE}: its text occurs 0 times")
