"""Who may do what: one table of rules for all dialects.

For a caller, a verb and a topic, the first line that applies decides:

    1  a probe topic                                     allowed, always
    2  admin, asked by root or the bus's own user        allowed, always
    3  a deny rule names the caller                      denied
    4  delete, asked by the topic's creator              allowed
    5  delete, asked as an admin of the topic            allowed
    6  an allow rule names the caller                    allowed
    7  an allow rule speaks of the topic                 denied: it names others
    8  nothing speaks of it                              the default of the verb

By default whoever reaches a listener may create, produce, subscribe and call;
delete and admin are nobody's but theirs whom lines 2, 4 and 5 name.

Callers whom the same rules name are one *class*. The fan-out remembers a verdict
per class and topic, so a table of any size costs the hot path one array access.
Class 0 is for the overflow: should there ever be more classes than the fan-out
has room for, further callers are in it, and it gets every deny and no allow.

Over TCP the kernel tells a uid and no groups. `groups_of` then asks the host's
user database, which may not answer in time: until it does, such a caller is
*in doubt*: a member where that denies, and a stranger where that allows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from polybus.bus.rule_table import Placed, Speaking, VerbTable
from polybus.model import access_rule as rules
from polybus.model import topic_name
from polybus.model.access_rule import ADMIN, CALL, CREATE, DELETE, PRODUCE, SUBSCRIBE, Who
from polybus.model.identity import Identity

MAX_CLASSES = 65_536  # the fan-out keeps one byte per class and topic
OVERFLOW = 0
MAX_REMEMBERED = 65_536  # identities whose rules are worked out; some 200 bytes each
OPEN_BY_DEFAULT = frozenset({CREATE, PRODUCE, SUBSCRIBE, CALL})
ROOT_UID = 0
ANY_TOPIC = b""  # what is asked for admin rights over the whole bus: only a bare * covers it


class Named(NamedTuple):
    """Whom of those that rules name a caller is, one bit each: surely, and possibly."""

    surely: int
    possibly: int


NOBODY = Named(0, 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why` is for people; `by` is the rule that decided, if one did."""

    allowed: bool
    why: str
    by: Placed | None = None


class Ground(NamedTuple):
    """A verdict before it is put into words, which the hot path does without."""

    allowed: bool
    words: str
    by: Speaking | None = None


_PROBE = Ground(True, "probe topics are free of rules")
_BORN_ADMIN = Ground(True, "root and the bus's own user are its admins")
_CREATOR = Ground(True, "the topic's creator may delete it")
_ADMIN = Ground(True, "an admin of the topic may delete it")
_NAMED = "rule {rule} names the caller"
_CLOSED = "rule {rule} names others, and no rule names this caller"
_DEFAULTS = {
    verb: Ground(True, f"no rule speaks of it, and whoever reaches the bus may {verb}")
    for verb in OPEN_BY_DEFAULT
} | {
    DELETE: Ground(
        False, "no rule speaks of it, and delete is for the topic's creator: its user and service"
    ),
    ADMIN: Ground(False, "no rule speaks of it, and admin is for root and the bus's own user"),
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
        self._take(())

    @property
    def rules(self) -> tuple[Placed, ...]:
        return self._rules

    @property
    def class_count(self) -> int:
        return len(self._classes)

    def replace(self, placed: Iterable[Placed]) -> None:
        """The rules from now on. All classes are void; whoever watches is told."""
        self._take(tuple(placed))
        for changed in self._watchers:
            changed()

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def mentions(self, verb: str) -> bool:
        return verb in self._tables

    def classify(self, identity: Identity) -> int:
        """The class of callers that this one belongs to, until the rules change."""
        named = self._named(identity)
        number = self._numbers.get(named)
        if number is None:
            if len(self._classes) >= MAX_CLASSES:
                return OVERFLOW
            number = self._numbers[named] = len(self._classes)
            self._classes.append(named)
        return number

    def is_in_doubt(self, identity_class: int) -> bool:
        """Could the class of these callers change, once their groups are known?"""
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
        """May it? `as_admin`: the caller came in where admin rights count."""
        if verb not in self._tables and verb in OPEN_BY_DEFAULT:
            return True
        return self._ground(identity, verb, topic, creator, as_admin).allowed

    def decide(
        self,
        identity: Identity,
        verb: str,
        topic: bytes,
        creator: Identity | None = None,
        *,
        as_admin: bool = False,
    ) -> Verdict:
        """As `allows`, with the reason in plain words."""
        ground = self._ground(identity, verb, topic, creator, as_admin)
        by = ground.by.placed if ground.by else None
        return Verdict(ground.allowed, ground.words.format(rule=by), by)

    def _take(self, placed: tuple[Placed, ...]) -> None:
        self._rules = placed
        self._tables: dict[str, VerbTable] = {}
        bits: dict[tuple[Who, int | None], int] = {}
        for one in placed:
            bit = bits.setdefault((one.who, one.number), 1 << len(bits))
            for verb in one.rule.verbs:
                self._tables.setdefault(verb, VerbTable()).add(one, bit)
        self._whos = [(who, number, bit) for (who, number), bit in bits.items()]
        self._classes = [Named(0, (1 << len(bits)) - 1)]
        self._numbers: dict[Named, int] = {}
        self._remembered: dict[Hashable, Named] = {}

    def _named(self, identity: Identity) -> Named:
        if not self._whos:
            return NOBODY
        one = identity
        key = (one.uid, one.gid, one.groups, one.service, one.key)  # all that rules look at
        found = self._remembered.get(key)
        if found is None:
            found = self._work_out(identity)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            if found.surely == found.possibly:
                self._remembered[key] = found
        return found

    def _work_out(self, identity: Identity) -> Named:
        surely = possibly = 0
        groups = self._groups(identity)
        for who, number, bit in self._whos:
            if _names(who, number, identity, groups or frozenset()):
                surely |= bit
            elif groups is None and who.kind == rules.GROUP:
                possibly |= bit
        return Named(surely, surely | possibly)

    def _groups(self, identity: Identity) -> frozenset[int] | None:
        """All its groups; None if that is not known now."""
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

    def _ground(
        self, identity: Identity, verb: str, topic: bytes, creator: Identity | None, as_admin: bool
    ) -> Ground:
        if topic_name.is_probe(topic):
            return _PROBE
        if verb == ADMIN and not identity.key and identity.uid in self._admins:
            return _BORN_ADMIN
        table = self._tables.get(verb)
        by_rule = _by_rules(table, self._named(identity), topic) if table else None
        if by_rule and by_rule.by and by_rule.by.denies:
            return by_rule
        if verb == DELETE and identity.owns(creator):
            return _CREATOR
        if verb == DELETE and as_admin and self.allows(identity, ADMIN, topic):
            return _ADMIN
        return by_rule or _DEFAULTS[verb]


def _names(who: Who, number: int | None, identity: Identity, groups: frozenset[int]) -> bool:
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


def _by_rules(table: VerbTable, named: Named, topic: bytes) -> Ground | None:
    """What the rules say, deny before allow; None if none of them speaks of the topic."""
    allowing = closing = None
    for speaking in table.about(topic):
        if speaking.denies:
            if speaking.bit & named.possibly:
                return Ground(False, _NAMED, speaking)
        elif speaking.bit & named.surely:
            allowing = allowing or speaking
        else:
            closing = closing or speaking
    if allowing:
        return Ground(True, _NAMED, allowing)
    return Ground(False, _CLOSED, closing) if closing else None
