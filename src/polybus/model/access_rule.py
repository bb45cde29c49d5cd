"""Rules as people write them, one a line:

    allow user:alice produce,subscribe orders.*
    deny  group:interns subscribe salaries
    EFFECT WHO VERBS PATTERN

WHO is `user:NAME` or `user:UID`, `group:NAME` or `group:GID`, `service:UNIT` or
`service:/PATH/OF/EXECUTABLE`, `key:KEY`, `anonymous`, or `everyone`. A word with
a space in it is quoted as in a shell. What rules mean together is the policy's
(`bus.policy`); which number a user's name stands for is the host's.
"""

from __future__ import annotations

import shlex
import unicodedata
from dataclasses import dataclass

from polybus.errors import InvalidRule
from polybus.model.name_pattern import STAR
from polybus.model.topic_name import MAX_NAME_BYTES

ALLOW, DENY = "allow", "deny"
CREATE, PRODUCE, SUBSCRIBE = "create", "produce", "subscribe"
DELETE, CALL, ADMIN = "delete", "call", "admin"
VERBS = (CREATE, PRODUCE, SUBSCRIBE, DELETE, CALL, ADMIN)

USER, GROUP, SERVICE, KEY = "user", "group", "service", "key"
ANONYMOUS, EVERYONE = "anonymous", "everyone"
NAMED = (USER, GROUP, SERVICE, KEY)  # kinds that are written with a name
NUMBERED = (USER, GROUP)  # kinds that the host knows by a number

MAX_WHO_BYTES = 4096  # the path of an executable is no longer
MAX_NUMBER = 2**32 - 2  # of a user or group; the one above stands for "no change" in Linux
WORDS = "EFFECT WHO VERBS PATTERN, as in: allow user:alice produce,subscribe orders.*"


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a rule names."""

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
        if kind in NUMBERED and name.isascii() and name.isdigit():
            name = _number(text, name)
        return cls(kind, name)

    @property
    def number(self) -> int | None:
        """The uid or gid, if it is written as one."""
        numeric = self.kind in NUMBERED and self.name.isascii() and self.name.isdigit()
        return int(self.name) if numeric else None

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table. Two that print alike are the same rule."""

    effect: str
    who: Principal
    verbs: tuple[str, ...]
    pattern: str

    @classmethod
    def parse(cls, line: str) -> Rule:
        """The rule that a line spells, or `InvalidRule` saying what is wrong with it."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise InvalidRule(f"rule {_short(line)}: {str(error).lower()}") from None
        if len(words) != 4:
            raise InvalidRule(f"rule {_short(line)} has {len(words)} words: write {WORDS}")
        return cls.from_words(*words)

    @classmethod
    def from_words(cls, effect: str, who: str, verbs: str, pattern: str) -> Rule:
        """The rule of four words."""
        if effect not in (ALLOW, DENY):
            raise InvalidRule(f"a rule starts with {ALLOW} or {DENY}, not {_short(effect)}")
        return cls(effect, Principal.parse(who), _verbs(verbs), _pattern(pattern))

    @property
    def is_exact(self) -> bool:
        """Does it speak of one topic alone?"""
        return STAR not in self.pattern

    def __str__(self) -> str:
        words = (self.effect, str(self.who), ",".join(self.verbs), self.pattern)
        return " ".join(map(_quoted, words))


def _verbs(text: str) -> tuple[str, ...]:
    given = [word.strip() for word in text.split(",")]
    for word in given:
        if word not in VERBS:
            raise InvalidRule(f"unknown verb {_short(word)}: the verbs are {', '.join(VERBS)}")
    return tuple(verb for verb in VERBS if verb in given)


def _pattern(text: str) -> str:
    _check_text(text, "the pattern", MAX_NAME_BYTES)
    if "," in text:
        raise InvalidRule(f"pattern {_short(text)} contains ',', which no topic's name does")
    return text


def _check_text(text: str, what: str, max_bytes: int) -> None:
    if not text:
        raise InvalidRule(f"{what} is empty")
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in text):
        raise InvalidRule(f"{what} {_short(text)} contains a control character")
    if len(text.encode()) > max_bytes:
        raise InvalidRule(f"{what} {_short(text)} is longer than {max_bytes} bytes")


def _number(text: str, digits: str) -> str:
    if len(digits) > 10 or int(digits) > MAX_NUMBER:
        raise InvalidRule(f"{_short(text)} is no number of a user or group")
    return str(int(digits))


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _quoted(word: str) -> str:
    """Bare unless a shell's word rules need quotes; `*` is only a star here."""
    plain = not any(char.isspace() or char in "'\"\\" for char in word)
    return word if plain else shlex.quote(word)
