"""Rows for people: nothing cut off, nothing that a peer could do to a terminal."""

from __future__ import annotations

import pytest

from polybus.cli.table import rounded, show


def test_plain_columns_in_a_pipe(capsys):
    show(("id", "peer"), [(1, "127.0.0.1:9"), (22, "x")])
    assert capsys.readouterr().out == "id  peer\n1   127.0.0.1:9\n22  x\n"


def test_control_characters_do_not_reach_the_terminal(capsys):
    show(("peer",), [("\x1b[31m\n\x07",)])
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
    assert rounded(count) == text
