"""`acl.toml`: round trips, errors for invalid files, atomic writes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import ConfigError
from polybus.model.access_rule import Rule
from polybus.server.acl_file import HEADING, StoredRule, read_rules, write_rules

RULE = Rule.parse("allow user:alice produce,subscribe orders.*")
OTHER = Rule.parse("deny service:'/opt/My \"App\"/x' delete 'naïve \\\\ topic'")
NODE = "node:0x" + "ab" * 20
THIRD = Rule.parse(f"allow {NODE} call public/greeter")
WORD = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=9
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "acl.toml"


def test_missing_file_has_no_rules(path):
    assert read_rules(path) == ()


def test_written_rules_are_read(path):
    kept = (StoredRule(RULE), StoredRule(OTHER, by=1000), StoredRule(THIRD, by=NODE))
    write_rules(path, kept)
    assert read_rules(path) == kept
    assert path.read_text().startswith(HEADING)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_rules(path, ())
    assert read_rules(path) == ()
    assert list(path.parent.iterdir()) == [path]


@given(WORD, WORD.filter(lambda word: "," not in word))
def test_any_rule_survives_a_round_trip(tmp_path_factory, service: str, pattern: str):
    path = tmp_path_factory.mktemp("acl") / "acl.toml"
    kept = (StoredRule(Rule.from_words("allow", f"service:{service}", "produce", pattern)),)
    write_rules(path, kept)
    assert read_rules(path) == kept


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[acl", "not valid TOML"),
        ("\xff", "not valid TOML"),
        ("a = " + "[" * 5000, "not valid TOML"),
        ("acl = 1", "a list of tables"),
        ("acl = ['allow user:a produce x']", "[[acl]] 1: lacks rule"),
        ("[[acl]]\nrule = 1", "[[acl]] 1: lacks rule"),
        ("[[acl]]\nby = 1", "[[acl]] 1: lacks rule"),
        ("[[rule]]\nrule = 'x'", "'rule', where only [[acl]] belongs"),
        ("[[acl]]\nrule = 'allow user:a produce x'\nbye = 1", "no key 'bye'"),
        ("[[acl]]\nrule = 'allow user:a produce x'\nby = -1", "by is the number of a user"),
        ("[[acl]]\nrule = 'allow user:a produce x'\nby = true", "by is the number of a user"),
        ("[[acl]]\nrule = 'allow user:a produce x'\nby = 'root'", "by is the number of a user"),
        ("[[acl]]\nrule = 'allow user:a produce x'\n[[acl]]\nrule = 'no'", "[[acl]] 2: rule 'no'"),
        ("[[acl]]\nrule = 'allow user:a produce x'\n" * 4097, "4096 are allowed"),
    ],
)
def test_invalid_acl_file_is_one_clear_line(path, text: str, says: str):
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        read_rules(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_acl_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        read_rules(tmp_path)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_failed_write_leaves_the_old_file(path, step: str, monkeypatch: pytest.MonkeyPatch):
    write_rules(path, (StoredRule(RULE),))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if step == "fsync" else Path, step, full)
    with pytest.raises(OSError, match="No space"):
        write_rules(path, (StoredRule(OTHER),))
    assert read_rules(path) == (StoredRule(RULE),)
    assert list(path.parent.iterdir()) == [path]


def test_leftover_of_a_killed_write_is_replaced(path):
    path.with_name("acl.toml.new").write_text("half a fi")
    write_rules(path, (StoredRule(RULE),))
    assert read_rules(path) == (StoredRule(RULE),)
    assert list(path.parent.iterdir()) == [path]
