"""How a command ends: the line and the exit code of every error."""

from __future__ import annotations

import pytest

from polybus import errors
from polybus.cli import exit_status


def every_error() -> list[type[errors.PolybusError]]:
    found = [errors.PolybusError]
    for kind in found:
        found += kind.__subclasses__()
    return found


def make(kind: type[errors.PolybusError]) -> errors.PolybusError:
    more = {errors.MissingExtra: ("extra",), errors.Trimmed: (7,)}
    return kind("what went wrong", *more.get(kind, ()))


EXPECTED = {
    errors.UsageError: 2,
    errors.ConfigError: 2,
    errors.AddressError: 2,
    errors.AddressInUse: 2,
    errors.DataFolderInUse: 2,
    errors.StoreFull: 2,
    errors.WrongFormat: 2,
    errors.NotConnected: 3,
    errors.ConnectionLost: 3,
    errors.Denied: 4,
    errors.LimitReached: 4,
    errors.BadFrame: 5,
    errors.ServiceFailed: 6,
    errors.PolybusError: 1,
}


@pytest.mark.parametrize("kind", every_error())
def test_errors_have_a_line_and_an_exit_code(kind, capsys):
    code = exit_status.report_error(make(kind))
    out, err = capsys.readouterr()
    assert code == EXPECTED.get(kind, code)
    assert 1 <= code <= 6
    assert out == ""
    assert err.startswith("polybus: ")
    assert err.count("\n") == 1


def test_multi_line_text_is_joined(capsys):
    exit_status.report_error(errors.ConfigError("first\n  second\n\tthird"))
    assert capsys.readouterr().err == "polybus: first second third\n"


def test_unexpected_error_mentions_the_traceback_variable(capsys, monkeypatch):
    monkeypatch.delenv("POLYBUS_DEBUG", raising=False)
    assert exit_status.report_error(ZeroDivisionError("oops")) == 1
    err = capsys.readouterr().err
    hint = "(set POLYBUS_DEBUG=1 for a traceback)"
    assert err == f"polybus: unexpected ZeroDivisionError: oops {hint}\n"
    monkeypatch.setenv("POLYBUS_DEBUG", "1")
    assert exit_status.report_error(ZeroDivisionError("oops")) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops\npolybus: unexpected ZeroDivisionError: oops\n" in err


def test_ctrl_c_prints_nothing(capsys):
    assert exit_status.report_error(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_exit_code_is_kept(capsys):
    assert exit_status.report_error(SystemExit(7)) == 7
    assert exit_status.report_error(SystemExit("text")) == 1
    assert capsys.readouterr().err == ""
