"""The access policy: one table of rules for all dialects.

For a caller, a verb and a topic, the first line that applies decides:

    1  a probe topic                                     allowed, always
    2  admin, asked by root or the bus's own user        allowed, always
    3  a deny rule names the caller                      denied
    4  delete, asked by the topic's creator              allowed
    5  delete, asked as an admin of the topic            allowed
    6  an allow rule names the caller                    allowed
    7  an allow rule speaks of the topic                 denied: it names others
    8  nothing speaks of it                              the default of the verb

By default any caller may create, produce, subscribe and call; delete and admin are limited
to the callers of lines 2, 4 and 5.

Callers that are named by the same rules form one *class*. The fan-out caches a verdict per
class and topic, so a table of any size costs the hot path one array access. Class 0 is the
overflow: if there are more classes than the fan-out has room for, further callers belong to
it, and it gets every deny and no allow.

Over TCP the kernel reports a uid without groups. `groups_of` then asks the host's user
database, which may not answer in time. Until it does, the caller is *in doubt*: a member of
a group for deny rules, not a member for allow rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from polybus.bus.rule_table import IndexedRule, PlacedRule, VerbTable
from polybus.model import access_rule as rules
from polybus.model import topic_name
from polybus.model.access_rule import ADMIN, CALL, CREATE, DELETE, PRODUCE, SUBSCRIBE, Principal
from polybus.model.identity import Identity

MAX_CLASSES = 65_536  # the fan-out keeps one byte per class and topic
OVERFLOW = 0
MAX_REMEMBERED = 65_536  # cached identities, some 200 bytes each
OPEN_BY_DEFAULT = frozenset({CREATE, PRODUCE, SUBSCRIBE, CALL})
ROOT_UID = 0
ANY_TOPIC = b""  # stands for the whole bus in admin checks: only a bare * covers it


class RuleMatch(NamedTuple):
    """The principals of rules that match a caller, one bit each: surely, and possibly."""

    surely: int
    possibly: int


NO_MATCH = RuleMatch(0, 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict; `why` is text for people, `by` the rule that decided, if any."""

    allowed: bool
    why: str
    by: PlacedRule | None = None


class Decision(NamedTuple):
    """A verdict without its text, which the hot path does not need."""

    allowed: bool
    words: str
    by: IndexedRule | None = None


_PROBE = Decision(True, "probe topics are free of rules")
_BORN_ADMIN = Decision(True, "root and the bus's own user are its admins")
_CREATOR = Decision(True, "the topic's creator may delete it")
_ADMIN = Decision(True, "an admin of the topic may delete it")
_NAMED = "rule {rule} names the caller"
_CLOSED = "rule {rule} names others, and no rule names this caller"
_DEFAULTS = {
    verb: Decision(True, f"no rule speaks of it, and any caller may {verb}")
    for verb in OPEN_BY_DEFAULT
} | {
    DELETE: Decision(
        False, "no rule speaks of it, and delete is for the topic's creator: its user and service"
    ),
    ADMIN: Decision(False, "no rule speaks of it, and admin is for root and the bus's own user"),
}


class Policy:
    def __init__(
        self,
        admins: Iterable[int] = (ROOT_UID,),
        groups_of: Callable[[int], frozenset[int] | None] = lambda uid: frozenset(),
    ) -> None:
        self._admins = frozenset(admins)
        self._groups_of = groups_of
        self._watchers: list[Callable[[], None]] = []
        self._install_rules(())

    @property
    def rules(self) -> tuple[PlacedRule, ...]:
        return self._rules

    @property
    def class_count(self) -> int:
        return len(self._classes)

    def replace(self, placed: Iterable[PlacedRule]) -> None:
        """Replace the rules. All classes become invalid; watchers are called."""
        self._install_rules(tuple(placed))
        for changed in self._watchers:
            changed()

    def on_change(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def has_rules_for(self, verb: str) -> bool:
        return verb in self._tables

    def classify(self, identity: Identity) -> int:
        """Return the class of a caller. It is valid until the rules change."""
        named = self._match_of(identity)
        number = self._numbers.get(named)
        if number is None:
            if len(self._classes) >= MAX_CLASSES:
                return OVERFLOW
            number = self._numbers[named] = len(self._classes)
            self._classes.append(named)
        return number

    def is_born_admin(self, identity: Identity) -> bool:
        """Return True for root and the bus's own user, whatever the rules. Thread-safe."""
        return not identity.key and identity.uid in self._admins

    def is_admin(self, identity: Identity) -> bool:
        """Return True for an admin of the whole bus."""
        return self.allows(identity, ADMIN, ANY_TOPIC)

    def is_in_doubt(self, identity_class: int) -> bool:
        """Return True if the class may change once the groups of its callers are known."""
        named = self._classes[identity_class]
        return identity_class != OVERFLOW and named.surely != named.possibly

    def may_produce(self, identity_class: int, topic: bytes) -> bool:
        return self._class_may(identity_class, PRODUCE, topic)

    def may_subscribe(self, identity_class: int, topic: bytes) -> bool:
        return self._class_may(identity_class, SUBSCRIBE, topic)

    def allows(
        self,
        identity: Identity,
        verb: str,
        topic: bytes,
        creator: Identity | None = None,
        *,
        as_admin: bool = False,
    ) -> bool:
        """Return True if the policy allows it. `as_admin`: admin rights count here."""
        if verb not in self._tables and verb in OPEN_BY_DEFAULT:
            return True
        return self._decide(identity, verb, topic, creator, as_admin).allowed

    def decide(
        self,
        identity: Identity,
        verb: str,
        topic: bytes,
        creator: Identity | None = None,
        *,
        as_admin: bool = False,
    ) -> Verdict:
        """Return the verdict of `allows` with its reason."""
        ground = self._decide(identity, verb, topic, creator, as_admin)
        by = ground.by.placed if ground.by else None
        return Verdict(ground.allowed, ground.words.format(rule=by), by)

    def _install_rules(self, placed: tuple[PlacedRule, ...]) -> None:
        self._rules = placed
        self._tables: dict[str, VerbTable] = {}
        bits: dict[tuple[Principal, int | None], int] = {}
        for one in placed:
            bit = bits.setdefault((one.who, one.number), 1 << len(bits))
            for verb in one.rule.verbs:
                self._tables.setdefault(verb, VerbTable()).add(one, bit)
        self._whos = [(who, number, bit) for (who, number), bit in bits.items()]
        self._classes = [RuleMatch(0, (1 << len(bits)) - 1)]
        self._numbers: dict[RuleMatch, int] = {}
        self._remembered: dict[Hashable, RuleMatch] = {}

    def _match_of(self, identity: Identity) -> RuleMatch:
        if not self._whos:
            return NO_MATCH
        one = identity
        key = (one.uid, one.gid, one.groups, one.service, one.key)  # the fields that rules use
        found = self._remembered.get(key)
        if found is None:
            found = self._match_rules(identity)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            if found.surely == found.possibly:
                self._remembered[key] = found
        return found

    def _match_rules(self, identity: Identity) -> RuleMatch:
        surely = possibly = 0
        groups = self._groups(identity)
        for who, number, bit in self._whos:
            if _names(who, number, identity, groups or frozenset()):
                surely |= bit
            elif groups is None and who.kind == rules.GROUP:
                possibly |= bit
        return RuleMatch(surely, surely | possibly)

    def _groups(self, identity: Identity) -> frozenset[int] | None:
        """Return all groups of a caller, None if they are not known yet."""
        if identity.key or identity.uid is None:
            return frozenset()
        if identity.groups is not None:
            return identity.groups if identity.gid is None else identity.groups | {identity.gid}
        if not any(who.kind == rules.GROUP for who, _, _ in self._whos):
            return frozenset()
        return self._groups_of(identity.uid)

    def _class_may(self, identity_class: int, verb: str, topic: bytes) -> bool:
        table = self._tables.get(verb)
        if table is None or topic_name.is_probe(topic):
            return True
        by_rule = _by_rules(table, self._classes[identity_class], topic)
        return by_rule is None or by_rule.allowed

    def _decide(
        self, identity: Identity, verb: str, topic: bytes, creator: Identity | None, as_admin: bool
    ) -> Decision:
        if topic_name.is_probe(topic):
            return _PROBE
        if verb == ADMIN and self.is_born_admin(identity):
            return _BORN_ADMIN
        table = self._tables.get(verb)
        by_rule = _by_rules(table, self._match_of(identity), topic) if table else None
        if by_rule and by_rule.by and by_rule.by.denies:
            return by_rule
        if verb == DELETE and identity.owns(creator):
            return _CREATOR
        if verb == DELETE and as_admin and self.allows(identity, ADMIN, topic):
            return _ADMIN
        return by_rule or _DEFAULTS[verb]


def _names(who: Principal, number: int | None, identity: Identity, groups: frozenset[int]) -> bool:
    if who.kind == rules.EVERYONE:
        return True
    if who.kind == rules.ANONYMOUS:
        return identity.is_anonymous
    if who.kind == rules.KEY or identity.key:
        return who.kind == rules.KEY and who.name == identity.key
    if who.kind == rules.SERVICE:
        return who.name == identity.service  # a rule's name is never empty
    if number is None or identity.uid is None:
        return False
    return number == identity.uid if who.kind == rules.USER else number in groups


def _by_rules(table: VerbTable, named: RuleMatch, topic: bytes) -> Decision | None:
    """Return the verdict of the rules, deny before allow; None if no rule covers the topic."""
    allowing = closing = None
    for speaking in table.find_matching(topic):
        if speaking.denies:
            if speaking.bit & named.possibly:
                return Decision(False, _NAMED, speaking)
        elif speaking.bit & named.surely:
            allowing = allowing or speaking
        else:
            closing = closing or speaking
    if allowing:
        return Decision(True, _NAMED, allowing)
    return Decision(False, _CLOSED, closing) if closing else None
