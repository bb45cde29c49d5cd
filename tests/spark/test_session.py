"""What a session needs, what it says if that is missing, and what it keeps to itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark
import pytest

from polybus.errors import ConfigError
from polybus.spark.class_data_sharing import load_flags
from polybus.spark.spark_session import (
    LONGEST_FOLDER,
    SOCKETS,
    STARTUP,
    check_java,
    lacks_executors,
    socket_settings,
)
from polybus.spark.stderr_filter import hold_stderr

ROOT = Path(__file__).parents[2]
OLD = "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2"
VERY_OLD = "echo 'java version \"1.8.0_402\"' >&2"


def fake_java(folder: Path, script: str) -> Path:
    """A JAVA_HOME whose java does this."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


# --- Java


def test_the_java_of_this_machine_will_do():
    check_java()


@pytest.mark.parametrize(("script", "found"), [(OLD, "Java 11"), (VERY_OLD, "Java 8")])
def test_an_old_java_is_named_with_what_to_install(tmp_path, monkeypatch, script, found):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, script)))
    with pytest.raises(ConfigError, match=f"{found}: install Java 17 or newer .*apt-get install"):
        check_java()


def test_no_java(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is none: install Java 17.*correct JAVA_HOME="):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is none: install Java 17.*or set JAVA_HOME"):
        check_java()


def test_classes_that_do_not_fit_cost_nothing_but_time(tmp_path):
    archive = tmp_path / "spark.jsa"
    assert load_flags(archive) == ""
    archive.write_bytes(b"of another Java")
    java = shutil.which("java")
    assert java is not None
    told = subprocess.run(
        [java, *load_flags(archive).split(), "-version"], capture_output=True, text=True, check=True
    )
    assert archive.name not in told.stdout + told.stderr


def need_java(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / ".ci" / "need"), "java"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_setup_finds_a_java_that_will_do():
    done = need_java()
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("script", [OLD, VERY_OLD, "exit 1"])
def test_setup_says_in_one_line_that_java_is_too_old(tmp_path, script):
    done = need_java(JAVA_HOME=str(fake_java(tmp_path, script)))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Java 17 or newer" in line
    assert "JAVA_HOME" in line


# --- PySpark


def test_without_pyspark_it_is_said_what_brings_it():
    script = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from polybus.errors import MissingExtra\n"
        "try:\n    import polybus.spark\n"
        "except MissingExtra as error:\n    sys.stdout.write(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "Spark is not installed: pip install 'polybus[spark]'"


# --- workers


def in_a_worker(script: str, *places: Path | str) -> str:
    """What a Python says that is started as Spark starts its workers: its zip comes first."""
    said, complained = both_of_a_worker(script, *places)
    assert complained == ""
    return said


def both_of_a_worker(script: str, *places: Path | str) -> tuple[str, str]:
    path = [str(Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"), str(STARTUP)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *map(str, places)])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


def test_workers_load_pyspark_as_it_is_installed():
    found = in_a_worker("import sys, pyspark; sys.stdout.write(pyspark.__file__)")
    assert found == pyspark.__file__


def test_they_do_not_look_into_the_zips_of_what_is_installed():
    found = in_a_worker("import sys; sys.stdout.write('\\n'.join(sys.path))")
    assert ".zip" not in found.replace(f"python3{sys.version_info.minor}.zip", "")


@pytest.mark.parametrize(
    ("place", "error", "is_said"),
    [
        ("/pyspark/daemon.py", "BrokenPipeError", False),  # Java has hung up
        ("/pyspark/daemon.py", "KeyError", True),
        ("/job/users.py", "BrokenPipeError", True),
    ],
)
def test_only_of_a_hung_up_java_nothing_is_said(place, error, is_said):
    failing = f"import traceback\ntry: raise {error}\nexcept Exception: traceback.print_exc()"
    _, said = both_of_a_worker(f"exec(compile({failing!r}, {place!r}, 'exec'))")
    assert (error in said) == is_said


def test_nobody_else_reaches_the_sockets_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    folder = Path(socket_settings()[f"{SOCKETS}.dir"])
    assert folder.stat().st_mode & 0o77 == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / folder.name).mkdir(mode=0o755)  # somebody was here before us
    assert socket_settings() == {}


def test_where_names_are_too_long_for_sockets_there_are_none(tmp_path, monkeypatch):
    long = tmp_path / ("x" * LONGEST_FOLDER)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert socket_settings() == {}


def test_another_sitecustomize_is_run_all_the_same(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("FOUND = 'both'\n")
    script = "import sys, sitecustomize; sys.stdout.write(sitecustomize.FOUND)"
    assert in_a_worker(script, tmp_path) == "both"


# --- a quiet terminal


def say(text: str) -> None:
    subprocess.run(["sh", "-c", f"echo {text} >&2"], check=True)


def test_what_a_program_says_while_it_starts_is_kept(capfd):
    with hold_stderr():
        say("noise")
    say("later")
    assert capfd.readouterr().err == "later\n"


def test_if_it_does_not_start_all_of_it_is_shown(capfd):
    def start() -> None:
        with hold_stderr():
            say("why")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        start()
    assert capfd.readouterr().err == "why\n"


def test_what_it_says_once_it_is_up_is_passed_on(capfd):
    with hold_stderr():
        program = subprocess.Popen(
            ["sh", "-c", "echo noise >&2; read line; echo $line >&2"], stdin=subprocess.PIPE
        )
        say("more noise")
    program.communicate(b"news\n")
    shown = capfd.readouterr().err
    while "news" not in shown:
        shown += capfd.readouterr().err
    assert shown in ("news\n", "noise\nnews\n")  # it may have been slow to begin


def test_who_asks_for_it_hears_all(capfd):
    with hold_stderr(is_quiet=False):
        say("noise")
    assert capfd.readouterr().err == "noise\n"


def test_tasks_on_this_machine_need_no_executor(spark):
    assert not lacks_executors(spark)
