"""Children of a nursery answer, fail, die and are told apart."""

from __future__ import annotations

import os
import select
import signal

import pytest

from tests.rig.forked_child import ChildFailed, Nursery

# Any module will do: its functions are the acts.


def test_a_child_answers():
    with Nursery("operator") as nursery:
        assert nursery.ask("add", 3, 4) == 7
        assert nursery.ask("add", "a", "b") == "ab"


def test_a_failure_comes_as_text():
    with Nursery("operator") as nursery:
        assert "ZeroDivisionError" in nursery.run("truediv", 1, 0).failure
        with pytest.raises(ChildFailed, match="ZeroDivisionError"):
            nursery.ask("truediv", 1, 0)


def test_a_kill_is_told_from_an_end():
    with Nursery("time") as nursery:
        child = nursery.start("sleep", 60)
        assert not child.ended()
        child.kill()
        ended = child.wait()
        assert (ended.signal, ended.answer) == (signal.SIGKILL, None)


def test_any_signal_will_do():
    with Nursery("time") as nursery:
        child = nursery.start("sleep", 60)
        child.kill(signal.SIGTERM)
        assert child.wait().signal == signal.SIGTERM
        assert nursery.ask("time") > 0


def test_a_child_ends_with_its_nursery():
    with Nursery("time") as nursery:
        pid = nursery.start("sleep", 600).pid
        handle = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([handle], [], [], 30)
        assert readable, "it lives on"
    finally:
        os.close(handle)


def test_what_a_child_prints_is_no_answer():
    with Nursery("builtins") as nursery:
        assert nursery.ask("print", "12345") is None
        assert nursery.ask("len", "12345") == 5


def test_the_environment_is_the_childs():
    with Nursery("os", {"POLYBUS_X": "x"}) as nursery:
        assert nursery.ask("getenv", "POLYBUS_X") == "x"


def test_a_module_that_is_not_there():
    with (
        Nursery("polybus.no_such_module") as nursery,
        pytest.raises((ChildFailed, BrokenPipeError)),
    ):
        nursery.ask("act")
