"""Children of a fork server answer, fail and die; each end is reported as it was."""

from __future__ import annotations

import os
import select
import signal

import pytest

from tests.rig.fork_server import ChildFailed, ChildServer

# Any module will do: children call its functions.


def test_child_answers_with_json():
    with ChildServer("operator") as server:
        assert server.ask("add", 3, 4) == 7
        assert server.ask("add", "a", "b") == "ab"


def test_failure_is_reported_as_traceback():
    with ChildServer("operator") as server:
        assert "ZeroDivisionError" in server.run("truediv", 1, 0).failure
        with pytest.raises(ChildFailed, match="ZeroDivisionError"):
            server.ask("truediv", 1, 0)


def test_kill_is_reported_as_signal():
    with ChildServer("time") as server:
        child = server.start("sleep", 60)
        assert not child.has_ended
        child.kill()
        result = child.wait()
        assert (result.signal, result.answer) == (signal.SIGKILL, None)


def test_other_signals_are_reported():
    with ChildServer("time") as server:
        child = server.start("sleep", 60)
        child.kill(signal.SIGTERM)
        assert child.wait().signal == signal.SIGTERM
        assert server.ask("time") > 0


def test_child_ends_with_its_server():
    with ChildServer("time") as server:
        pid = server.start("sleep", 600).pid
        handle = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([handle], [], [], 30)
        assert readable, "it lives on"
    finally:
        os.close(handle)


def test_printed_text_is_not_an_answer():
    with ChildServer("builtins") as server:
        assert server.ask("print", "12345") is None
        assert server.ask("len", "12345") == 5


def test_environment_reaches_the_child():
    with ChildServer("os", {"POLYBUS_X": "x"}) as server:
        assert server.ask("getenv", "POLYBUS_X") == "x"


def test_missing_module_fails_the_request():
    with (
        ChildServer("polybus.no_such_module") as server,
        pytest.raises(ChildFailed),
    ):
        server.ask("act")
