"""The rules of one verb, found by topic.

The rules of a topic are looked up once per class of callers, and a publisher may invent
topics as fast as it can send them, so the search must not grow with the table. Rules for
one name are found by that name, rules with stars by the prefix before the first star: only
the prefix lengths that occur are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from polybus.model.access_rule import DENY, Principal, Rule
from polybus.model.name_pattern import Pattern
from polybus.model.topic_name import DEAD_LETTER_SUFFIX


@dataclass(frozen=True, slots=True)
class PlacedRule:
    """A rule in force. `source` is where it is written, for display.

    `number` is the uid or gid of the user or group on this host; None if the host does not
    know the name, and then the rule matches no caller.
    """

    rule: Rule
    source: str
    number: int | None = None

    @property
    def who(self) -> Principal:
        return self.rule.who

    def __str__(self) -> str:
        return f'"{self.rule}" ({self.source})'


class IndexedRule(NamedTuple):
    """A rule in a table; `bit` is the bit of its principal.

    `names_topic`: it speaks of the topics that it covers as such, not by a wide pattern that
    covers them by chance. Its pattern is a name, or ends in `.dlq` and covers dead letters.
    """

    placed: PlacedRule
    pattern: Pattern
    bit: int
    denies: bool
    names_topic: bool

    def is_for(self, topic: bytes) -> bool:
        """Return whether this is a rule for the topic itself, or for dead letters and it is one."""
        return self.names_topic and self.pattern.matches(topic)


class VerbTable:
    def __init__(self) -> None:
        self._exact: dict[bytes, list[IndexedRule]] = {}
        # Longest first, so that the closest rule is the one that explains.
        self._by_length: dict[int, dict[bytes, list[IndexedRule]]] = {}

    def add(self, placed: PlacedRule, bit: int) -> None:
        pattern = Pattern(placed.rule.pattern)
        names_topic = pattern.is_exact or placed.rule.pattern.endswith(DEAD_LETTER_SUFFIX)
        speaking = IndexedRule(placed, pattern, bit, placed.rule.effect == DENY, names_topic)
        if pattern.is_exact:
            self._exact.setdefault(pattern.prefix, []).append(speaking)
            return
        length = len(pattern.prefix)
        if length not in self._by_length:
            self._by_length[length] = {}
            self._by_length = dict(sorted(self._by_length.items(), reverse=True))
        self._by_length[length].setdefault(pattern.prefix, []).append(speaking)

    def find_matching(self, topic: bytes) -> Iterator[IndexedRule]:
        """Yield the rules whose pattern covers the topic, the closest first."""
        yield from self._exact.get(topic, ())
        for length, rules in self._by_length.items():
            for speaking in rules.get(topic[:length], ()):
                if speaking.pattern.matches(topic):
                    yield speaking
