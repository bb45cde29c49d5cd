"""How far a long command has come, on a terminal and in a log."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from polybus.cli.progress_bar import LINE_EVERY_S, _lines, format_size

SHOWS = """
from polybus.cli.progress_bar import show_progress
with show_progress("verifying") as show:
    for done in range(0, 101, 50):
        show(done * 1_000_000, 100_000_000)
print("done")
"""


def test_progress_lines_in_a_pipe(capsys):
    now_s = [0.0]
    progress = _lines("copying", clock=lambda: now_s[0])
    for second in range(12):
        now_s[0] = float(second)
        progress(second * 1_000_000, 12_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["copying: 5.0 MB of 12.0 MB", "copying: 10.0 MB of 12.0 MB"]
    assert LINE_EVERY_S == 5.0


def test_quick_command_prints_no_progress_in_a_pipe():
    done = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"done\n", b"")


def test_progress_bar_on_a_terminal():
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SHOWS],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    ) as child:
        os.close(theirs)
        shown = _read_all(ours)
        out, _ = child.communicate()
    assert out == b"done\n"
    assert b"verifying" in shown
    assert b"100.0/100.0 MB" in shown


def _read_all(fd: int) -> bytes:
    shown = b""
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:  # how a terminal without anyone at its other end ends
            break
        if not data:
            break
        shown += data
    os.close(fd)
    return shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1234567, "1.2 MB"), (5 * 10**13, "50.0 TB")],
)
def test_sizes(count, shown):
    assert format_size(count) == shown
