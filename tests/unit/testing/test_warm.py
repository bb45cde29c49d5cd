"""A bus that was forked from a loaded process is one like any other."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from polybus.testing.bus_process import StartFailed, rqueue, run, serve
from tests.rig import warm_bus
from tests.rig.fork_server import ForkedProcess
from tests.rig.observer import stats


def files_of(pid: int) -> set[str]:
    """But those that have no name of their own."""
    names = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for name in names if not name.startswith("anon_inode:")}


def test_it_is_forked_and_ends_as_the_command_does(monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # as after a session of Spark
    with rqueue() as bus:
        assert isinstance(bus.process, ForkedProcess)
        assert bus.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            bus.wait(0.01)
        assert bus.stop() == 0
        assert bus.process.poll() == 0
        assert "stopped" in bus.log()


def test_a_kill_is_reported_and_ends_no_other_bus():
    with serve() as one, serve() as other:
        one.signal(signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL
        assert stats(other)["server"]["pid"] == other.pid


def test_it_has_its_own_environment_folder_and_files(tmp_path, monkeypatch):
    with rqueue() as before:
        monkeypatch.chdir(tmp_path)
        with serve("--data", "here", env={"POLYBUS_LOG_FORMAT": "json"}) as bus:
            assert Path(f"/proc/{bus.pid}/cwd").readlink() == tmp_path
            assert files_of(bus.pid) & files_of(before.pid) == {"/dev/null"}
            bus.stop()
            assert bus.log().startswith("{")
        assert (tmp_path / "here").is_dir()


@pytest.mark.parametrize("words", [("config", "show"), ("no-such-command",), ("topic", "ls")])
def test_a_command_answers_as_a_program_does(words):
    with serve(listen=("native=grpc://127.0.0.1:0",)) as bus:
        forked = bus.run(*words)
        with warm_bus.cold():
            program = bus.run(*words)
    assert outcome_of(forked) == outcome_of(program)


def outcome_of(ended: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return ended.returncode, ended.stdout, ended.stderr


def test_a_command_that_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        run("rqueue", "--port", "0", timeout_s=0.2)


def test_a_failed_start_is_reported():
    with pytest.raises(StartFailed) as caught:
        serve(listen=("rqueue=nonsense",))
    assert caught.value.code == 2


@pytest.mark.parametrize("env", [{"PYTHONPATH": "/nowhere"}, {"LC_ALL": "POSIX"}])
def test_variables_of_the_interpreter_need_a_process_of_their_own(env):
    with rqueue(env=env) as bus:
        assert isinstance(bus.process, subprocess.Popen)


def test_cold_starts_need_a_process_of_their_own():
    with warm_bus.cold(), rqueue() as bus:
        assert isinstance(bus.process, subprocess.Popen)
    with rqueue() as bus:
        assert isinstance(bus.process, ForkedProcess)
