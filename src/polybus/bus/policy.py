"""The access policy: one table of rules for all dialects.

For a caller, a verb and a topic, the first line that applies decides:

    1  a probe topic                                     allowed, always
    2  create or produce, on a reserved topic            denied, always: only the bus does
    3  admin, asked by root or the bus's own user        allowed, always
    4  a deny rule names the caller                      denied
    5  delete, asked by the topic's creator              allowed
    6  delete, asked as an admin of the topic            allowed
    7  restricted to admins of the topic: subscribe      allowed to them, and to callers that
       and delete on a reserved topic, produce to        an allow rule for the topic itself
       dead letters                                      names; denied to all others
    8  an allow rule names the caller                    allowed
    9  an allow rule speaks of the topic                 denied: it names others
   10  nothing speaks of it                              the default of the verb

By default any caller may create, produce, subscribe and call; delete and admin are limited
to the callers of lines 3, 5 and 6. A node of the network may do nothing by default, and no
`allow everyone` names it, only `allow node:…`; a `deny everyone` does. An allow rule for nodes
closes nothing to other callers.

Reserved topics are written by the bus itself; dialects declare them (`Dialect`).

Dead letters (`orders.dlq`, model/topic_name.py) inherit: a caller that the rules of `orders`
deny a verb is denied it on `orders.dlq`, too, and a caller that they allow it is allowed, if
the rules that cover `orders.dlq` do not deny it. An allow rule for the dead letters
themselves, which has a pattern that ends in `.dlq`, takes the place of the allow rules of
`orders` for the callers that it names; deny rules of `orders` count always.

Callers that are named by the same rules form one *class*. The fan-out caches a verdict per
class and topic, so a table of any size costs the hot path one array access. Class 0 is the
overflow: if there are more classes than the fan-out has room for, further callers belong to
it, and it gets every deny and no allow.

A caller may be *in doubt*: it is not known whether a rule names it. A deny rule that possibly
names it counts, an allow rule counts only if it surely names it.

    its groups are unknown    Over TCP the kernel reports a uid without groups. `groups_of` asks
                              the host's user database, which may not answer in time. Until it
                              does, the caller is possibly a member of every group.
    its user is unknown       A local peer that has hung up (`model.identity`). It possibly is
                              any user, in any group and service, or anonymous. `everyone`
                              surely names it. No `key:` does, because a peer proves its key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from polybus.bus.rule_table import IndexedRule, PlacedRule, VerbTable
from polybus.model import access_rule as rules
from polybus.model import topic_name
from polybus.model.access_rule import ADMIN, CALL, CREATE, DELETE, PRODUCE, SUBSCRIBE, Principal
from polybus.model.identity import Identity
from polybus.model.name_pattern import STAR

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
    is_admin: bool = False  # root, or the bus's own user
    is_node: bool = False  # a bus on another machine


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

    @property
    def is_deny_rule(self) -> bool:
        return self.by is not None and self.by.denies


_PROBE = Decision(True, "probe topics are free of rules")
_BORN_ADMIN = Decision(True, "root and the bus's own user are its admins")
_CREATOR = Decision(True, "the topic's creator may delete it")
_ADMIN = Decision(True, "an admin of the topic may delete it")
_BUS_ONLY = Decision(False, "the topic is reserved: only the bus creates and writes it")
_RESTRICTED_ADMIN = Decision(True, "an admin of the topic may")
_RESERVED = Decision(
    False, "the topic is reserved for admins, and callers that an allow rule for it names"
)
_RESERVED_VERBS = {
    CREATE: _BUS_ONLY,
    PRODUCE: _BUS_ONLY,
    SUBSCRIBE: _RESERVED,
    DELETE: _RESERVED,
}
_DEAD_LETTERS = Decision(
    False,
    "consumer groups write dead letters; others need to be an admin of the topic, or an allow "
    "rule with a pattern that ends in .dlq",
)
_DEAD_LETTER_VERBS = {PRODUCE: _DEAD_LETTERS}
_RESERVED_LETTER_VERBS = {**_RESERVED_VERBS, PRODUCE: _DEAD_LETTERS}
_NO_VERBS: Mapping[str, Decision] = {}
_NAMED = "rule {rule} names the caller"
_MAY_NAME = "rule {rule} may name the caller, which is in doubt"
_NODE = Decision(False, "no rule allows it to this node of the network")
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
        reserved: Mapping[str, str] | None = None,
    ) -> None:
        """`reserved` has the topics that only the bus writes, each with its purpose."""
        self._admins = frozenset(admins)
        self._reserved = {name.encode(): purpose for name, purpose in (reserved or {}).items()}
        self._groups_of = groups_of
        self._watchers: list[Callable[[], None]] = []
        self._install_rules(())

    @property
    def rules(self) -> tuple[PlacedRule, ...]:
        return self._rules

    def replace(self, placed: Iterable[PlacedRule]) -> None:
        """Replace the rules. All classes become invalid; watchers are called."""
        self._install_rules(tuple(placed))
        for changed in self._watchers:
            changed()

    def on_change(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def has_rules_for(self, verb: str) -> bool:
        return verb in self._tables

    def can_deny(self, verb: str, topic: bytes) -> bool:
        """Return False if every caller may, so that no caller has to be checked."""
        return verb in self._tables or verb not in OPEN_BY_DEFAULT or self.is_restricted(topic)

    def is_restricted(self, topic: bytes) -> bool:
        """Return whether callers are refused on this topic even if there are no rules."""
        return bool(self._restrictions(topic))

    def purpose_of(self, topic: bytes) -> str | None:
        """Return the purpose of a reserved topic, None for any other topic."""
        return self._reserved.get(topic)

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
        """Return True for root and the bus's own user: no rule locks them out. Thread-safe."""
        return not identity.key and identity.uid in self._admins

    def is_admin(self, identity: Identity) -> bool:
        """Return True for an admin of the whole bus."""
        return self.allows(identity, ADMIN, ANY_TOPIC)

    def is_in_doubt(self, identity_class: int) -> bool:
        """Return True if rules possibly name its callers. Groups that become known end it."""
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
        if not identity.node and not self.can_deny(verb, topic):
            return True
        named, is_creator = self._match_of(identity), identity.owns(creator)
        return self._decide(named, verb, topic, is_creator, as_admin).allowed

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
        named, is_creator = self._match_of(identity), identity.owns(creator)
        ground = self._decide(named, verb, topic, is_creator, as_admin)
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
            is_node = bool(identity.node)
            return NO_MATCH._replace(is_admin=self.is_born_admin(identity), is_node=is_node)
        one = identity
        # The fields that rules use.
        key = (one.uid, one.gid, one.groups, one.service, one.key, one.is_in_doubt, one.node)
        found = self._remembered.get(key)
        if found is None:
            found = self._match_rules(identity)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            if found.surely == found.possibly or one.is_in_doubt or one.node:
                self._remembered[key] = found
        return found

    def _match_rules(self, identity: Identity) -> RuleMatch:
        surely = possibly = 0
        groups = self._groups(identity)
        for who, number, bit in self._whos:
            if _names(who, number, identity, groups or frozenset()):
                surely |= bit
            else:
                is_member = groups is None and who.kind == rules.GROUP
                is_user = identity.is_in_doubt and _may_name_local(who, number)
                is_every_node = bool(identity.node) and who.kind == rules.EVERYONE
                if is_member or is_user or is_every_node:
                    possibly |= bit
        is_admin, is_node = self.is_born_admin(identity), bool(identity.node)
        return RuleMatch(surely, surely | possibly, is_admin, is_node)

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
        if not self.can_deny(verb, topic):
            return True
        return self._decide(self._classes[identity_class], verb, topic).allowed

    def _decide(
        self,
        named: RuleMatch,
        verb: str,
        topic: bytes,
        is_creator: bool = False,
        as_admin: bool = False,
    ) -> Decision:
        if topic_name.is_probe(topic):
            return _PROBE
        restriction = self._restrictions(topic).get(verb)
        if restriction is _BUS_ONLY:
            return _BUS_ONLY
        if verb == ADMIN and named.is_admin:
            return _BORN_ADMIN
        by_rule = self._by_rules(named, verb, topic)
        if by_rule and by_rule.is_deny_rule:
            return by_rule
        if verb == DELETE and is_creator:
            return _CREATOR
        if verb == DELETE and as_admin and self._decide(named, ADMIN, topic).allowed:
            return _ADMIN
        if restriction is None:
            return by_rule or (_NODE if named.is_node else _DEFAULTS[verb])
        if by_rule and by_rule.allowed and by_rule.by and by_rule.by.is_for(topic):
            return by_rule
        is_admin = self._decide(named, ADMIN, topic).allowed
        return _RESTRICTED_ADMIN if is_admin else restriction

    def _restrictions(self, topic: bytes) -> Mapping[str, Decision]:
        """Return the verbs that are not for every caller, each with the refusal of others."""
        if topic in self._reserved:
            return _RESERVED_VERBS
        source = topic_name.dead_letter_source(topic)
        if source is None:
            return _NO_VERBS
        return _RESERVED_LETTER_VERBS if source in self._reserved else _DEAD_LETTER_VERBS

    def _by_rules(self, named: RuleMatch, verb: str, topic: bytes) -> Decision | None:
        """Return the verdict of the rules, inherited ones included; None if there are none."""
        table = self._tables.get(verb)
        if table is None:
            return None
        own = _find_verdict(table, named, topic)
        source = None if verb == CALL else topic_name.dead_letter_source(topic)
        if source is None or (own and own.is_deny_rule):
            return own
        inherited = _find_verdict(table, named, source)
        if own is None or inherited is None or inherited.is_deny_rule:
            return inherited or own
        takes_over = own.by is not None and own.by.names_topic
        return inherited if own.allowed and not (inherited.allowed or takes_over) else own


def _names(who: Principal, number: int | None, identity: Identity, groups: frozenset[int]) -> bool:
    if identity.node or who.kind == rules.NODE:
        is_named = who.name in (identity.node, STAR)
        return bool(identity.node) and who.kind == rules.NODE and is_named
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


def _may_name_local(who: Principal, number: int | None) -> bool:
    """Return whether a rule may name a local caller of an unknown user, who showed no key."""
    is_unknown_here = number is None and who.kind in (rules.USER, rules.GROUP)
    return who.kind not in (rules.KEY, rules.NODE) and not is_unknown_here


def _find_verdict(table: VerbTable, named: RuleMatch, topic: bytes) -> Decision | None:
    """Return the verdict of the rules, deny before allow; None if no rule covers the topic.

    Of the allow rules that name the caller, one for the topic itself is preferred.
    """
    allowing = closing = None
    for speaking in table.find_matching(topic):
        if speaking.denies:
            if speaking.bit & named.possibly:
                is_sure = named.surely & speaking.bit
                return Decision(False, _NAMED if is_sure else _MAY_NAME, speaking)
        elif speaking.bit & named.surely:
            if allowing is None or (speaking.names_topic and not allowing.names_topic):
                allowing = speaking
        elif speaking.placed.who.kind != rules.NODE:  # a rule for nodes closes nothing to others
            closing = closing or speaking
    if allowing:
        return Decision(True, _NAMED, allowing)
    return Decision(False, _CLOSED, closing) if closing else None
