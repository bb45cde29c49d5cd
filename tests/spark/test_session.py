"""Requirements of a session, its error messages, and its terminal output."""

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
from polybus.spark.spark_session import (
    LONGEST_FOLDER,
    SOCKETS,
    STARTUP,
    check_java,
    class_archive_flags,
    lacks_executors,
    socket_settings,
)
from polybus.spark.stderr_filter import hold_stderr

ROOT = Path(__file__).parents[2]
OLD = "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2"
VERY_OLD = "echo 'java version \"1.8.0_402\"' >&2"


def fake_java(folder: Path, script: str) -> Path:
    """Create a JAVA_HOME whose java runs this script."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


# --- Java


def test_installed_java_is_accepted():
    check_java()


@pytest.mark.parametrize(("script", "found"), [(OLD, "Java 11"), (VERY_OLD, "Java 8")])
def test_old_java_is_reported_with_a_remedy(tmp_path, monkeypatch, script, found):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, script)))
    with pytest.raises(ConfigError, match=f"{found}: install Java 17 or newer .*apt-get install"):
        check_java()


def test_missing_java_is_reported_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"which is not installed: install Java 17.*correct JAVA_HOME="
    ):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"which is not installed: install Java 17.*or set JAVA_HOME"
    ):
        check_java()


def test_class_archive_of_another_java_is_ignored(tmp_path):
    archive = tmp_path / "spark.jsa"
    assert class_archive_flags(archive) == ""
    archive.write_bytes(b"of another Java")
    java = shutil.which("java")
    assert java is not None
    output = subprocess.run(
        [java, *class_archive_flags(archive).split(), "-version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert archive.name not in output.stdout + output.stderr


def need_java(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / ".ci" / "need"), "java"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_setup_accepts_the_installed_java():
    done = need_java()
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("script", [OLD, VERY_OLD, "exit 1"])
def test_setup_reports_an_old_java_in_one_line(tmp_path, script):
    done = need_java(JAVA_HOME=str(fake_java(tmp_path, script)))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Java 17 or newer" in line
    assert "JAVA_HOME" in line


# --- PySpark


def test_missing_pyspark_names_the_extra():
    script = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from polybus.errors import MissingExtra\n"
        "try:\n    import polybus.spark\n"
        "except MissingExtra as error:\n    sys.stdout.write(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "Spark is not installed; run: pip install 'polybus[spark]'"


# --- workers


def worker_output(script: str, *places: Path | str) -> str:
    """Return the output of a Python that is started like a Spark worker, with Spark's zip first."""
    stdout, stderr = worker_outputs(script, *places)
    assert stderr == ""
    return stdout


def worker_outputs(script: str, *places: Path | str) -> tuple[str, str]:
    path = [str(Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"), str(STARTUP)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *map(str, places)])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


def test_workers_import_the_installed_pyspark():
    path = worker_output("import sys, pyspark; sys.stdout.write(pyspark.__file__)")
    assert path == pyspark.__file__


def test_workers_have_no_zips_of_installed_packages_on_their_path():
    paths = worker_output("import sys; sys.stdout.write('\\n'.join(sys.path))")
    assert ".zip" not in paths.replace(f"python3{sys.version_info.minor}.zip", "")


@pytest.mark.parametrize(
    ("place", "error", "is_printed"),
    [
        ("/pyspark/daemon.py", "BrokenPipeError", False),  # Java closed the connection
        ("/pyspark/daemon.py", "KeyError", True),
        ("/job/users.py", "BrokenPipeError", True),
    ],
)
def test_only_broken_pipes_of_the_daemon_are_muted(place, error, is_printed):
    failing = f"import traceback\ntry: raise {error}\nexcept Exception: traceback.print_exc()"
    _, stdout = worker_outputs(f"exec(compile({failing!r}, {place!r}, 'exec'))")
    assert (error in stdout) == is_printed


def test_socket_folder_must_be_private(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    folder = Path(socket_settings()[f"{SOCKETS}.dir"])
    assert folder.stat().st_mode & 0o77 == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / folder.name).mkdir(mode=0o755)  # created by another user
    assert socket_settings() == {}


def test_long_path_disables_unix_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * LONGEST_FOLDER)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert socket_settings() == {}


def test_shadowed_sitecustomize_is_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("FOUND = 'both'\n")
    script = "import sys, sitecustomize; sys.stdout.write(sitecustomize.FOUND)"
    assert worker_output(script, tmp_path) == "both"


# --- a quiet terminal


def write_stderr(text: str) -> None:
    subprocess.run(["sh", "-c", f"echo {text} >&2"], check=True)


def test_stderr_is_dropped_if_the_start_succeeds(capfd):
    with hold_stderr():
        write_stderr("noise")
    write_stderr("later")
    assert capfd.readouterr().err == "later\n"


def test_stderr_is_shown_if_the_start_fails(capfd):
    def start() -> None:
        with hold_stderr():
            write_stderr("why")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        start()
    assert capfd.readouterr().err == "why\n"


def test_stderr_after_the_start_is_forwarded(capfd):
    with hold_stderr():
        program = subprocess.Popen(
            ["sh", "-c", "echo noise >&2; read line; echo $line >&2"], stdin=subprocess.PIPE
        )
        write_stderr("more noise")
    program.communicate(b"news\n")
    shown = capfd.readouterr().err
    while "news" not in shown:
        shown += capfd.readouterr().err
    assert shown in ("news\n", "noise\nnews\n")  # the program may start slowly


def test_stderr_is_not_held_back_if_not_quiet(capfd):
    with hold_stderr(is_quiet=False):
        write_stderr("noise")
    assert capfd.readouterr().err == "noise\n"


def test_local_session_needs_no_executor(spark):
    assert not lacks_executors(spark)
