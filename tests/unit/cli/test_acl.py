"""`polybus acl` against a real bus: output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from polybus.cli.main import run
from polybus.testing import bus_process
from polybus.testing.bus_process import BusProcess


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with bus_process.serve() as bus:
        yield bus


class Acl:
    """Run the command in this process; only the bus must be another one."""

    def __init__(self, bus: BusProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self._admin = str(bus.admin_path)
        self._capsys = capsys

    def __call__(self, *words: str) -> Said:
        self._capsys.readouterr()
        code = run(["acl", *words, "--admin", self._admin])
        return Said(code, *self._capsys.readouterr())

    def wipe(self) -> None:
        for one in json.loads(self("ls", "--json").out):
            self("rm", one["rule"])


@pytest.fixture
def acl(bus: BusProcess, capsys: pytest.CaptureFixture[str]) -> Iterator[Acl]:
    made = Acl(bus, capsys)
    yield made
    made.wipe()


def test_add_ls_rm(acl):
    assert acl("ls") == (0, "no rules\n", "")
    assert json.loads(acl("ls", "--json").out) == []
    words = ("allow", "user:0", "subscribe,produce", "orders.*")
    assert acl("add", *words) == (0, "added: allow user:0 produce,subscribe orders.*\n", "")
    assert acl("add", *words).out.startswith("already there: ")
    assert acl("add", "deny anonymous call 'a b'").out == "added: deny anonymous call 'a b'\n"
    lines = [line.split() for line in acl("ls").out.splitlines()]
    assert lines == [
        ["effect", "who", "verbs", "pattern", "written", "in"],
        ["allow", "user:0", "produce,subscribe", "orders.*", "acl.toml"],
        ["deny", "anonymous", "call", "a", "b", "acl.toml"],
    ]
    assert [line.split()[0] for line in acl("ls", "a b").out.splitlines()[1:]] == ["deny"]
    assert acl("ls", "nothing").out == "no rules\n"
    assert acl("rm", *words) == (0, "removed: allow user:0 produce,subscribe orders.*\n", "")
    found = json.loads(acl("ls", "--json").out)
    assert found == [
        {
            "rule": "deny anonymous call 'a b'",
            "source": "acl.toml",
            "by": None,
            "names_nobody": False,
        }
    ]


def test_acl_test_names_the_deciding_rule(acl):
    acl("add", "deny user:77 produce x*")
    said = acl("test", "user:77", "produce", "xyz")
    assert said == (4, 'denied: rule "deny user:77 produce x*" (acl.toml) names the caller\n', "")
    assert acl("test", "user:78", "produce", "xyz").code == 0
    found = acl("test", "user:77", "produce", "xyz", "--json")
    assert found.code == 4
    assert json.loads(found.out)["rule"] == "deny user:77 produce x*"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["add", "allow", "user:0", "produce"], 2, "a rule must have four words"),
        (["add", "allow user:0 produce"], 2, "has 3 words"),
        (["add", "allow", "root", "produce", "x"], 2, "who is 'root'?"),
        (["add", "allow", "user:0", "write", "x"], 2, "unknown verb 'write'"),
        (["add", "allow", "user:no-such-user", "produce", "x"], 4, "no user called"),
        (["rm", "allow", "user:0", "produce", "x"], 4, "there is no rule"),
        (["add"], 2, "Missing argument"),
        (["test", "user:0", "write", "x"], 2, "unknown verb 'write'"),
        (["test", "root", "produce", "x"], 2, "who is 'root'?"),
        (["test", "user:0", "produce"], 2, "Missing argument"),
        (["frob"], 2, "No such command 'frob'"),
    ],
)
def test_invalid_input_is_one_clear_line(acl, words: list[str], code: int, says: str):
    said = acl(*words)
    assert said.code == code
    assert says in said.err
    assert said.err.startswith("polybus: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_invalid_rule_is_reported_without_a_bus(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nowhere = ["--admin", str(tmp_path / "admin.sock")]
    assert run(["acl", "add", "allow", "root", "produce", "x", *nowhere]) == 2
    assert "who is 'root'?" in capsys.readouterr().err
    assert run(["acl", "add", "allow", "user:0", "produce", "x", *nowhere]) == 3
    assert "no bus answers" in capsys.readouterr().err


def test_rule_without_a_data_folder_lasts_until_the_bus_stops(
    capsys: pytest.CaptureFixture[str],
):
    with bus_process.rqueue("--admin") as bus:
        said = Acl(bus, capsys)("add", "deny anonymous call x")
        assert said.out == (
            "added: deny anonymous call x (until this bus stops: it has no data folder)\n"
        )
        assert not bus.data.exists()


def without_sources(shown: str) -> list[str]:
    return [line.partition(" #")[0] for line in shown.splitlines()]


def test_config_shows_rules_and_quotas_as_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "bus.toml"
    file.write_text(
        """acl = ["deny service:'/opt/My App/x' produce 'a b'"]\n"""
        '[quotas.users]\n"o.d d" = {quota_topics = 5}\n'
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["config", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert """acl = ["deny 'service:/opt/My App/x' produce 'a b'"]""" in shown
    assert 'users = {"o.d d" = {"quota_topics" = 5}}' in shown
    file.write_text(shown)
    assert run(["config", "show", str(file)]) == 0
    assert without_sources(capsys.readouterr().out) == without_sources(shown)
    assert run(["config", "check", str(file)]) == 2
    assert "no user called 'o.d d'" in capsys.readouterr().err
