"""The shell's language: a line is a command, an answer is a line."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.pirate.client.pirate_options import Order
from polybus.dialects.pirate.shell import USAGE, Quit, Shell, printable_body
from polybus.errors import DoesNotExist, Fenced, OutcomeUnknown, UsageError
from tests.unit.pirate.conftest import losing


class Spoken:
    """A shell that records its answers."""

    def __init__(self, client, order=Order.DELIVER_THEN_RECORD):
        self.answers = []
        self.shell = Shell(client, order, self.answers.append)

    def __call__(self, line):
        del self.answers[:]
        self.shell.run(line)
        return list(self.answers)


@pytest.fixture
def say(keeper):
    return Spoken(keeper)


def test_every_command_is_answered(opening, topic):
    say = Spoken(opening())
    assert say(f"SUB {topic}\n") == ["OK 0"]
    assert say(f"PUT {topic} hello\n") == ["OK 1"]
    assert say(f"GET {topic} 1\n") == ["MSG 1 hello"]
    assert say(f"GET {topic} 1\n") == ["NONE"]
    assert say("RESUME\n") == ["OK no request is pending"]
    assert say("FORGET\n") == ["OK no request is pending"]
    assert say(f"UNSUB {topic}\n") == ["OK 1"]
    assert say(f"UNSUB {topic}\n") == ["OK 0"]
    assert say.shell.failed is None
    with pytest.raises(Quit):
        say("QUIT")
    assert say.answers == ["OK"]


def test_help_lists_every_command_in_one_line(say):
    (line,) = say("HELP")
    assert line == "OK " + " | ".join(USAGE.values())


def test_commands_are_case_insensitive_and_empty_lines_ignored(say, topic):
    assert say(f"  sub {topic}  ") == ["OK 0"]
    for line in ("", "\n", "   \n", "\r\n"):
        assert say(line) == []


def test_put_data_is_the_rest_of_the_line(say, topic):
    for data in ("two  words ", " led by a space", '"quoted"', "übung", "*", "#", "\udcff"):
        say(f"PUT {topic} {data}\n")
        raw = data.encode("utf-8", "surrogateescape")
        (answer,) = say(f"GET {topic} 1")
        assert answer.split(" ", 2)[2] == printable_body(raw)


@pytest.mark.parametrize("form", ["", " *"], ids=["plain", "star"])
def test_get_reads_until_no_message_is_left(say, topic, form):
    for data in ("a", "b", "c"):
        say(f"PUT {topic} {data}")
    assert say(f"GET {topic}{form}") == ["MSG 1 a", "MSG 2 b", "MSG 3 c", "NONE"]
    assert say(f"GET {topic}{form}") == ["NONE"]


def test_get_one_reads_one_message(say, topic):
    for data in ("a", "b"):
        say(f"PUT {topic} {data}")
    assert say(f"GET {topic} 1") == ["MSG 1 a"]
    assert say(f"GET {topic}") == ["MSG 2 b", "NONE"]
    assert say(f"GET {topic} 1") == ["NONE"]


def test_put_sends_each_file_as_a_message(say, topic, tmp_path):
    for name, content in (("one", b"1"), ("two words", b"2\n"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    line = f'PUT {topic} @{tmp_path}/one "@{tmp_path}/two words" @{tmp_path}/empty'
    assert say(line) == ["OK 1 2 3"]
    assert say(f"GET {topic}") == ["MSG 1 1", r"MSG 2 2\n", "MSG 3 ", "NONE"]


def test_first_failed_file_ends_the_command(say, topic, tmp_path):
    (tmp_path / "one").write_bytes(b"1")
    (answer,) = say(f"PUT {topic} @{tmp_path}/one @{tmp_path}/none @{tmp_path}/one")
    assert answer == f"ERROR after 1: {tmp_path}/none: No such file or directory"
    assert say(f"GET {topic}") == ["MSG 1 1", "NONE"]
    (answer,) = say(f"PUT {topic} @{tmp_path}")
    assert answer == f"ERROR {tmp_path}: Is a directory"


def test_double_at_escapes_text(say, topic):
    assert say(f"PUT {topic} @@x @y") == ["OK 1"]
    assert say(f"GET {topic} 1") == ["MSG 1 @x @y"]


def test_too_large_file_is_not_sent(say, topic, tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    (answer,) = say(f"PUT {topic} @{tmp_path}/large")
    assert answer.startswith(f"ERROR {tmp_path}/large: a message must have at most")


WRONG = """
SUB | SUB a b | UNSUB | UNSUB a b | SUB a,b | PUT | PUT a | PUT a @ | PUT a @x y | PUT a @"x
GET | GET a b | GET a 2 | GET a 1 1 | QUIT now | RESUME 1 | FORGET 1 | HELP me | HELLO
"""


def test_invalid_commands_are_errors(say):
    for line in WRONG.strip().replace("\n", " | ").split(" | "):
        (answer,) = say(line)
        assert answer.startswith("ERROR "), line
        assert isinstance(say.shell.failed, UsageError)
    assert say.shell._client.counter == 1


def test_refusal_of_the_bus_is_an_error(opening, topic):
    say = Spoken(opening())
    (answer,) = say(f"PUT {topic} x")
    assert answer.startswith("ERROR PUT ")
    assert "NO_TOPIC" in answer
    (answer,) = say(f"GET {topic}")
    assert "NOT_SUBSCRIBED" in answer
    assert isinstance(say.shell.failed, DoesNotExist)


def test_pending_request_is_resumed_or_forgotten(gate, opening, keeper, topic):
    client = opening("a", gate.endpoint)
    say = Spoken(client)
    for order, answer in (
        ("RESUME", f"OK PUT {topic} (counter 1): 1"),
        ("FORGET", "OK used: the bus has executed or refused it"),
    ):
        with losing(gate, client):
            (unknown,) = say(f"PUT {topic} x")
        assert unknown.startswith("ERROR the bus at ")
        assert "is unknown" in unknown
        assert say(order) == [answer]
    assert isinstance(say.shell.failed, OutcomeUnknown)


def test_resume_of_a_refused_request_is_an_error(gate, opening, topic):
    client = opening("a", gate.endpoint)
    say = Spoken(client)
    with losing(gate, client):
        say(f"PUT {topic} x")
    assert say("RESUME") == [f"ERROR PUT {topic} (counter 1): NO_TOPIC"]


def test_fenced_shell_ends(opening, topic):
    say = Spoken(opening("a", id=topic[-60:]))
    opening("b", id=topic[-60:])
    with pytest.raises(Fenced):
        say(f"SUB {topic}")
    (answer,) = say.answers
    assert answer.startswith("ERROR SUB ")


class Gone(Exception):
    """The reader of the answers has closed them."""


@pytest.mark.parametrize("order", list(Order))
def test_order_decides_whether_an_unprinted_message_is_recorded(keeper, topic, order):
    def show(line):
        raise Gone

    keeper.put(topic, b"hello")
    with pytest.raises(Gone):
        Shell(keeper, order, show).run(f"GET {topic}")
    again = Spoken(keeper)(f"GET {topic} 1")
    assert again == (["NONE"] if order is Order.RECORD_THEN_DELIVER else ["MSG 1 hello"])


def read_back(shown: str) -> bytes:
    """The bytes that a body's line stands for."""
    short = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\"}

    def meant(found: re.Match[bytes]) -> bytes:
        return short.get(found[1]) or bytes.fromhex(found[1][1:].decode())

    return re.sub(rb"\\(\\|n|r|t|x..)", meant, shown.encode())


@given(st.binary(max_size=50) | st.text().map(str.encode))
def test_printed_body_is_one_line_and_can_be_parsed(body):
    shown = printable_body(body)
    assert shown.isprintable()
    assert read_back(shown) == body
