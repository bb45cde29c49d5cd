"""Access rules: valid and invalid lines, and the round trip through text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import InvalidRule
from polybus.model.access_rule import VERBS, Principal, Rule
from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from polybus.model.name_pattern import Pattern

# --- rules


def test_the_parts_of_a_rule():
    rule = Rule.parse("allow user:alice subscribe,produce orders.*")
    assert rule == Rule("allow", Principal("user", "alice"), ("produce", "subscribe"), "orders.*")
    assert str(rule) == "allow user:alice produce,subscribe orders.*"
    assert not rule.is_exact
    assert Rule.from_words("deny", "everyone", "delete", "orders").is_exact


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("deny   anonymous\tcall,call  x", "deny anonymous call x"),
        ("allow user:0042 admin *", "allow user:42 admin *"),
        ("allow group:4294967294 create a", "allow group:4294967294 create a"),
        ("allow service:'/opt/My App/x' create a", "allow 'service:/opt/My App/x' create a"),
        ("allow key:a:b call 'with space'", "allow key:a:b call 'with space'"),
        (r"deny user:bob produce it\'s", """deny user:bob produce 'it'"'"'s'"""),
        ("deny user:bob produce #1;$x?[a]", "deny user:bob produce #1;$x?[a]"),
        ("deny user:bob produce ünïcode.✓", "deny user:bob produce ünïcode.✓"),
        ("deny user:bob produce _private", "deny user:bob produce _private"),
    ],
)
def test_rule_is_printed_in_its_canonical_form(text: str, again: str):
    rule = Rule.parse(text)
    assert str(rule) == again
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 0 words"),
        ("allow user:a produce", "has 3 words"),
        ("allow user:a produce x y", "has 5 words"),
        ("allow user:a produce 'x", "no closing quotation"),
        ("permit user:a produce x", "starts with allow or deny"),
        ("ALLOW user:a produce x", "starts with allow or deny"),
        ("allow alice produce x", "who is 'alice'?"),
        ("allow user: produce x", "who is 'user:'?"),
        ("allow uid:5 produce x", "who is 'uid:5'?"),
        ("allow anonymous:x produce x", "who is 'anonymous:x'?"),
        ("allow everyone: produce x", "who is 'everyone:'?"),
        ("allow user:4294967295 produce x", "uid or gid must be at most 4294967294"),
        ("allow user:99999999999999999999 produce x", "uid or gid must be at most 4294967294"),
        ("allow 'user:a\0' produce x", "control character"),
        ("allow user:a write x", "unknown verb 'write'"),
        ("allow user:a produce, x", "unknown verb ''"),
        ("allow user:a PRODUCE x", "unknown verb 'PRODUCE'"),
        ("allow user:a produce ''", "the pattern is empty"),
        ("allow user:a produce a,b", "contains ','"),
        ("allow user:a produce 'a\nb'", "control character"),
        ("allow user:a produce " + "x" * 256, "longer than 255 bytes"),
        ("allow user:a produce " + "é" * 128, "longer than 255 bytes"),
        ("allow service:" + "x" * 4097 + " produce x", "longer than 4096 bytes"),
    ],
)
def test_invalid_rule_is_refused_with_one_line(text: str, says: str):
    with pytest.raises(InvalidRule) as caught:
        Rule.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def assert_one_line(error: InvalidRule) -> None:
    assert "\n" not in str(error)


WORD = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=9
)
WHOS = st.one_of(
    st.sampled_from(["anonymous", "everyone"]),
    st.tuples(st.sampled_from(["user", "group", "service", "key"]), WORD).map(":".join),
)
RULES = st.builds(
    Rule.from_words,
    st.sampled_from(["allow", "deny"]),
    WHOS.filter(lambda who: not re.search(r":\d{10}", who, re.ASCII)),
    st.lists(st.sampled_from(VERBS), min_size=1).map(",".join),
    WORD.filter(lambda word: "," not in word),
)


@given(RULES)
def test_a_printed_rule_is_the_same_rule(rule: Rule):
    assert Rule.parse(str(rule)) == rule


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_an_invalid_one(text: str):
    try:
        rule = Rule.parse(text)
    except InvalidRule as error:
        assert_one_line(error)
        return
    assert Rule.parse(str(rule)) == rule


def test_numbers_of_users_and_groups():
    assert Principal.parse("user:5").number == 5
    assert Principal.parse("group:0").number == 0
    assert Principal.parse("user:alice").number is None
    assert Principal.parse("user:٣").number is None  # a digit, but not one of ours
    assert Principal.parse("service:5").number is None


# --- patterns


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a", b"a", True),
        ("a", b"ab", False),
        ("*", b"", True),
        ("*", b"\xff\x00", True),
        ("a*", b"a", True),
        ("a*", b"ba", False),
        ("*a", b"ba", True),
        ("a*a", b"a", False),  # one a cannot be both ends
        ("a*a", b"aa", True),
        ("a*b*c", b"abc", True),
        ("a*b*c", b"a_c_b", False),
        ("ab*bc", b"abc", False),
        ("*ab*ab*", b"ab", False),
        ("*ab*ab*", b"xabxabx", True),
        ("*ab*ab*", b"xabx", False),  # one ab is not two
        ("*ab*b", b"xab", False),  # nor is its b the last one
        ("a.b", b"axb", False),  # a dot is a dot
        ("a[bc]", b"ab", False),
        ("é*", "éa".encode(), True),
        ("a\n*", b"a\nb", True),
    ],
)
def test_patterns(pattern: str, name: bytes, matches: bool):
    assert Pattern(pattern).matches(name) is matches


@given(
    st.text("ab*", max_size=8), st.binary(max_size=10).map(lambda b: bytes(97 + x % 3 for x in b))
)
def test_patterns_match_like_a_regular_expression(pattern: str, name: bytes):
    oracle = ".*".join(map(re.escape, pattern.split("*"))).encode()
    assert Pattern(pattern).matches(name) is bool(re.fullmatch(oracle, name, re.DOTALL))


def test_a_pattern_of_many_stars_does_not_go_astray():
    """With backtracking this would outlast the universe."""
    assert not Pattern("*a" * 120 + "*b").matches(b"a" * 255)


# --- identities


def test_names_and_accounts():
    assert (ANONYMOUS.name, ANONYMOUS.account) == ("anonymous", None)
    assert (IN_DOUBT.name, IN_DOUBT.account) == ("in-doubt", None)
    assert (IN_DOUBT.account_name, Identity(5).account_name) == ("anonymous", "uid:5")
    assert not IN_DOUBT.is_anonymous
    assert (Identity(5).name, Identity(5).account) == ("uid:5", 5)
    assert Identity(0).account == 0
    assert (Identity(5, key="k").name, Identity(5, key="k").account) == ("key:k", "k")
    assert not Identity(key="k").is_anonymous


@pytest.mark.parametrize(
    ("caller", "creator", "owns"),
    [
        (Identity(5), Identity(5), True),
        (Identity(5, gid=1, pid=2), Identity(5, gid=3, pid=4), True),
        (Identity(5), Identity(6), False),
        (Identity(5, service="a"), Identity(5, service="a"), True),
        (Identity(5, service="a"), Identity(5, service="b"), False),
        (Identity(5, service="a"), Identity(5), False),
        (Identity(0), Identity(5), False),
        (ANONYMOUS, ANONYMOUS, False),
        (IN_DOUBT, IN_DOUBT, False),
        (IN_DOUBT, ANONYMOUS, False),
        (Identity(5), ANONYMOUS, False),
        (Identity(5), None, False),
        (Identity(5, key="k"), Identity(6, service="x", key="k"), True),
        (Identity(5, key="k"), Identity(5), False),
        (Identity(5), Identity(5, key="k"), False),
    ],
)
def test_ownership_of_a_topic(caller: Identity, creator: Identity | None, owns: bool):
    assert caller.owns(creator) is owns
