"""`polybus pipeline`: parameters and output of its commands."""

from __future__ import annotations

import io
import signal

import pytest
import typer
from typer.testing import CliRunner

from polybus.cli import pipeline_progress
from polybus.cli.main import build, run
from polybus.cli.pipeline_command import command_of
from polybus.spark import pipelines
from polybus.spark.pipelines import Progress, Summary

NAMES = ["archive", "dead-letters", "replay", "retain", "route", "stats"]
A_PIPELINE = '''
from pyspark.sql import SparkSession
from polybus.spark.pipelines.query_run import Summary

def count_words(spark: SparkSession, topic: str, *, once: bool = False, tell=None) -> Summary:
    """Count words."""
    return Summary(7, 1.0)
'''


def help_of(*args):
    result = CliRunner().invoke(build(["pipeline"]), ["pipeline", *args, "--help"])
    assert result.exit_code == 0
    return result.output


def test_all_six_pipelines_are_listed():
    listed = [line.split()[0] for line in help_of().splitlines() if line.startswith("  ")]
    assert [name for name in NAMES if name not in listed] == []


@pytest.mark.parametrize("name", NAMES)
def test_pipelines_have_once_and_master_options(name):
    text = help_of(name)
    for option in ("--once", "--master", "--checkpoint", "--bus"):
        assert option in text


def test_pipeline_file_becomes_a_command(tmp_path, monkeypatch):
    (tmp_path / "count_words.py").write_text(A_PIPELINE)
    (tmp_path / "part.py").write_text("def other(): ...")
    monkeypatch.setattr(pipelines, "__path__", [*pipelines.__path__, str(tmp_path)])
    found = pipelines._find_pipelines()
    assert "count_words" in found
    assert "part" not in found
    root = typer.Typer()
    root.command()(command_of("count-words", found["count_words"]))
    text = CliRunner().invoke(root, ["--help"]).output
    assert "{topic}" in text.lower()
    assert "--once" in text
    assert "--tell" not in text
    assert "--spark " not in text


def test_pipeline_functions_are_importable():
    from polybus.spark.pipelines.archive import archive

    assert pipelines.archive is archive


def test_missing_bus_and_topic_are_one_line(capsys):
    assert run(["pipeline", "archive"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- output


def test_progress_lines_are_rate_limited(capsys):
    times = iter([0.0, 1.0, 6.0, 6.0, 7.0])
    tell = pipeline_progress._lines("archive", lambda: next(times))
    for rows in (1, 1_200_000, 5):
        tell(Progress(rows, 250.0, 3))
    assert capsys.readouterr().err == "archive: 1.2M rows, 250/s, 3 wait\n"


def test_progress_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with pipeline_progress.show_pipeline("archive") as tell:
        tell(Progress(10, 5.0, 90))
        tell(Progress(20, 5.0, None))
    assert "archive" in terminal.getvalue()
    assert "20 rows, 5/s" in terminal.getvalue()


def test_summary_has_rows_facts_and_seconds(capsys):
    facts: dict[str, object] = {"held back by": ["a", "b"]}
    pipeline_progress.print_summary("retain", Summary(7, 1.26, facts, signal.SIGTERM))
    out = capsys.readouterr().out
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [
        ["retain"],
        ["rows", "7"],
        ["held", "back by  a, b"],
        ["seconds", "1.3"],
    ]
