"""Access rules in text form, one per line:

    allow user:alice produce,subscribe orders.*
    deny  group:interns subscribe salaries
    EFFECT WHO VERBS PATTERN

WHO is `user:NAME` or `user:UID`, `group:NAME` or `group:GID`, `service:UNIT` or
`service:/PATH/OF/EXECUTABLE`, `key:KEY`, `node:ID` or `node:*` (a bus of the network),
`anonymous`, or `everyone`. A word with a space must be quoted as in a shell. `bus.policy`
decides by all rules together; the host resolves names of users and groups.
"""

from __future__ import annotations

import shlex
import unicodedata
from dataclasses import dataclass

from polybus.errors import InvalidRule
from polybus.model.identity import is_node_id
from polybus.model.name_pattern import STAR
from polybus.model.topic_name import MAX_NAME_BYTES

ALLOW, DENY = "allow", "deny"
CREATE, PRODUCE, SUBSCRIBE = "create", "produce", "subscribe"
DELETE, CALL, ADMIN = "delete", "call", "admin"
VERBS = (CREATE, PRODUCE, SUBSCRIBE, DELETE, CALL, ADMIN)

USER, GROUP, SERVICE, KEY, NODE = "user", "group", "service", "key", "node"
ANONYMOUS, EVERYONE = "anonymous", "everyone"
NAMED = (USER, GROUP, SERVICE, KEY, NODE)  # kinds with a name
NUMBERED = (USER, GROUP)  # kinds for which a number is allowed

MAX_WHO_BYTES = 4096  # PATH_MAX: the longest path of an executable
MAX_NUMBER = 2**32 - 2  # largest uid or gid; 2**32 - 1 means "no change" in Linux
WORDS = "EFFECT WHO VERBS PATTERN, as in: allow user:alice produce,subscribe orders.*"


@dataclass(frozen=True, slots=True)
class Principal:
    """The subject of a rule."""

    kind: str
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Principal:
        kind, colon, name = text.partition(":")
        if kind in (ANONYMOUS, EVERYONE) and not colon:
            return cls(kind)
        if kind not in NAMED or not name:
            kinds = ", ".join(f"{one}:NAME" for one in NAMED)
            raise InvalidRule(f"who is {text!r}? write {kinds}, {ANONYMOUS} or {EVERYONE}")
        _check_text(name, "the name", MAX_WHO_BYTES)
        if kind == NODE and name != STAR and not is_node_id(name):
            raise InvalidRule(f"node must be 0x and 40 hex digits, or *, got {_short(name)}")
        if kind in NUMBERED and name.isascii() and name.isdigit():
            name = _number(text, name)
        return cls(kind, name)

    @property
    def number(self) -> int | None:
        """Return the uid or gid, or None if the name is not a number."""
        numeric = self.kind in NUMBERED and self.name.isascii() and self.name.isdigit()
        return int(self.name) if numeric else None

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Rule:
    """One access rule. Rules with the same text are equal."""

    effect: str
    who: Principal
    verbs: tuple[str, ...]
    pattern: str

    @classmethod
    def parse(cls, line: str) -> Rule:
        """Parse a line. Raises InvalidRule with the reason."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise InvalidRule(f"rule {_short(line)}: {str(error).lower()}") from None
        if len(words) != 4:
            raise InvalidRule(f"rule {_short(line)} has {len(words)} words: write {WORDS}")
        return cls.from_words(*words)

    @classmethod
    def from_words(cls, effect: str, who: str, verbs: str, pattern: str) -> Rule:
        """Make a rule of its four words. Raises InvalidRule."""
        if effect not in (ALLOW, DENY):
            raise InvalidRule(f"a rule starts with {ALLOW} or {DENY}, not {_short(effect)}")
        principal, given = Principal.parse(who), [word.strip() for word in verbs.split(",")]
        for word in given:
            if word not in VERBS:
                raise InvalidRule(f"unknown verb {_short(word)}: the verbs are {', '.join(VERBS)}")
        _check_text(pattern, "the pattern", MAX_NAME_BYTES)
        if "," in pattern:
            raise InvalidRule(f"pattern {_short(pattern)} contains ',', which no topic's name does")
        return cls(effect, principal, tuple(verb for verb in VERBS if verb in given), pattern)

    @property
    def is_exact(self) -> bool:
        """Return whether the pattern matches a single topic."""
        return STAR not in self.pattern

    def __str__(self) -> str:
        words = (self.effect, str(self.who), ",".join(self.verbs), self.pattern)
        return " ".join(map(_quoted, words))


def _check_text(text: str, what: str, max_bytes: int) -> None:
    if not text:
        raise InvalidRule(f"{what} is empty")
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in text):
        raise InvalidRule(f"{what} {_short(text)} contains a control character")
    if len(text.encode()) > max_bytes:
        raise InvalidRule(f"{what} {_short(text)} is longer than {max_bytes} bytes")


def _number(text: str, digits: str) -> str:
    if len(digits) > 10 or int(digits) > MAX_NUMBER:
        raise InvalidRule(f"uid or gid must be at most {MAX_NUMBER}, got {_short(text)}")
    return str(int(digits))


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _quoted(word: str) -> str:
    """Quote a word if a shell would need it; `*` needs no quotes here."""
    plain = not any(char.isspace() or char in "'\"\\" for char in word)
    return word if plain else shlex.quote(word)
