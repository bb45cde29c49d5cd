"""Rows for people: nothing cut off, nothing that a peer could do to a terminal."""

from __future__ import annotations

import sys

import pytest

from polybus.cli.text_table import print_fields, print_table, round_count


def test_plain_columns_in_a_pipe(capsys):
    print_table(("id", "peer"), [(1, "127.0.0.1:9"), (22, "x")])
    assert capsys.readouterr().out == "id  peer\n1   127.0.0.1:9\n22  x\n"


def test_control_characters_do_not_reach_the_terminal(capsys):
    print_table(("peer",), [("\x1b[31m\n\x07",)])
    assert capsys.readouterr().out == "peer\n\\x1b[31m\\n\\x07\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (67_108_864, "67.1M"),
        (5 * 10**9, "5.0G"),
        (7 * 10**12, "7T"),
    ],
)
def test_rounded(count, text):
    assert round_count(count) == text


def test_narrow_terminal_does_not_cut_numbers(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("acked", "emitted", "redelivered"), [(1234567, 7654321, 1111111)])
    shown = capsys.readouterr().out
    for number in ("1234567", "7654321", "1111111"):
        assert number in shown


def test_terminal_gets_rounded_values_and_a_pipe_exact_ones(monkeypatch, capsys):
    rows: list[dict[str, object]] = [{"topic": "t", "acked": 1234567, "emitted": 7}, {"topic": "u"}]
    columns, short = ("topic", "acked", "emitted"), {"topic": "topic", "done": "acked"}
    print_fields(columns, short, rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [[*columns], ["t", "1234567", "7"], ["u"]]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_fields(columns, short, rows)
    shown = capsys.readouterr().out
    assert "1.2M" in shown
    assert "done" in shown
    assert "emitted" not in shown
