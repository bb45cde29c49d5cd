"""`polybus pirate` as a process, on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polybus.dialects.pirate.client import pirate_blocking
from polybus.testing.bus_process import POLYBUS, clean_environment
from tests.rig.observer import until
from tests.rig.pirate.gate import ALL

PATIENCE_S = 60
# Before the command itself: Ctrl-C that is typed there is for this process.
TAKE_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Command:
    """Runs `polybus pirate` with a state folder of its own."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.env = clean_environment(folder) | {"XDG_STATE_HOME": str(folder), "TERM": "dumb"}
        self.folder = folder
        self._start = [*POLYBUS, "pirate", "--server", endpoint, "--timeout", "10"]

    def script(self, *lines: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._start, *flags],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            env=self.env,
            timeout=PATIENCE_S,
            check=False,
        )

    @contextlib.contextmanager
    def terminal(self, *flags: str):
        main, side = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-c", TAKE_THE_TERMINAL, *self._start, *flags],
            stdin=side,
            stdout=side,
            stderr=side,
            env=self.env,
            start_new_session=True,
        )
        os.close(side)
        try:
            yield Terminal(main, child)
        finally:
            child.kill()
            child.wait()
            os.close(main)


class Terminal:
    def __init__(self, descriptor: int, child: subprocess.Popen) -> None:
        self.child = child
        self.seen = ""
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str) -> str:
        """Wait for a text and consume it. Returns the output before it."""
        until(lambda: text in self._read(), f"{text!r} on the terminal", PATIENCE_S)
        before, _, self.seen = self.seen.partition(text)
        return before

    def _read(self) -> str:
        with contextlib.suppress(OSError):
            self.seen += os.read(self._descriptor, 65536).decode()
        return self.seen


@pytest.fixture
def command(endpoint: str, tmp_path: Path) -> Command:
    return Command(endpoint, tmp_path)


def test_script_answers_every_line_and_continues_on_next_start(command, topic):
    done = command.script(f"SUB {topic}", f"PUT {topic} a", f"PUT {topic} b", f"GET {topic} 1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["OK 0", "OK 1", "OK 2", "MSG 1 a"]
    done = command.script(f"GET {topic}", "QUIT", "SUB nothing")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["MSG 2 b", "NONE", "OK"])
    (folder,) = (command.folder / "polybus-pirate").iterdir()
    assert {path.name for path in folder.iterdir()} == {"lock", "journal"}


def test_script_exits_with_the_code_of_its_first_failure(command, topic):
    done = command.script(f"PUT {topic} a", "NONSENSE", f"SUB {topic}", flags=("--id", topic[-60:]))
    assert done.returncode == 4
    error, nonsense, ok = done.stdout.splitlines()
    assert error.startswith("ERROR ")
    assert nonsense.startswith("ERROR unknown command NONSENSE")
    assert ok == "OK 0"


def test_terminal_saves_history_and_survives_ctrl_c(command, topic):
    flags = ("--state", str(command.folder / "state"))
    with command.terminal(*flags) as terminal:
        terminal.wait_for("HELP lists the commands")
        terminal.wait_for("pirate> ")
        terminal.type(f"SUB {topic}\n")
        terminal.wait_for("OK 0")
        terminal.wait_for("pirate> ")
        terminal.type("half a line\x03")
        terminal.wait_for("pirate> ")
        terminal.type("nonsense\n")
        assert "OK" not in terminal.wait_for("ERROR unknown command NONSENSE")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.child.wait(PATIENCE_S) == 0
    assert f"SUB {topic}" in (command.folder / "state" / "history").read_text()
    with command.terminal(*flags) as terminal:
        terminal.wait_for("pirate> ")
        terminal.type("\x10\x10\n")  # Ctrl-P: two lines back
        terminal.wait_for("OK 0")
        terminal.type("QUIT\n")
        assert terminal.child.wait(PATIENCE_S) == 0


def test_ctrl_c_during_a_command_leaves_it_pending(gate, topic, tmp_path):
    flags = ("--id", topic[-60:])
    with Command(gate.endpoint, tmp_path).terminal(*flags) as terminal:
        terminal.wait_for("pirate> ")
        gate.lose_requests = ALL
        terminal.type(f"SUB {topic}\n")
        until(lambda: any(frames[1] == b"SUB" for frames in gate.requests), "it was sent")
        terminal.type("\x03")
        terminal.wait_for("NOTE the outcome of SUB")
        gate.lose_requests = 0
        terminal.type("RESUME\n")
        terminal.wait_for(f"OK SUB {topic} (counter 1): 0")
        with pirate_blocking.connect(gate.endpoint, id=topic[-60:], state=tmp_path / "other"):
            terminal.type(f"GET {topic}\n")
            terminal.wait_for("ERROR GET")
        assert terminal.child.wait(PATIENCE_S) == 4  # fenced


def test_interrupted_script_exits(command):
    child = subprocess.Popen(
        [*command._start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=command.env
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        child.stdin.write(b"HELP\n")
        child.stdin.flush()
        assert child.stdout.readline().startswith(b"OK")
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 130
