"""The policy of a running bus: its rules at the admin socket, and their reload.

    acl_ls    topic?             the rules, or those that speak of a topic
    acl_add   rule               set one
    acl_rm    rule               remove one
    acl_test  who action topic   would it be allowed, and which rule decides

Rights to change rules:

    an admin of the whole bus (root, its own user,     every rule
    and callers with an `admin` rule on `*`)
    an admin of a pattern                              rules within it, `admin` aside
    a topic's creator                                  produce, subscribe and delete of that
                                                       topic and its dead letters; rules of
                                                       creators only
    a node of the network                              rules for nodes that nodes have set; the
                                                       dialect that vouches for it decides which

So neither a creator nor a node can remove a rule that an admin has set. Every caller may test.

A change is resolved and written on another thread, then takes effect, then is answered. A
change that cannot be written does not take effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.bus.policy import ANY_TOPIC, Policy
from polybus.bus.rule_table import PlacedRule
from polybus.errors import ConfigError, InvalidRule
from polybus.model import topic_name
from polybus.model.access_rule import ADMIN, DELETE, NODE, PRODUCE, SUBSCRIBE, Rule
from polybus.model.identity import Identity
from polybus.model.name_pattern import Pattern
from polybus.server import rule_set
from polybus.server.acl_file import ACL_NAME, MAX_RULES
from polybus.server.acl_test_caller import check_verb, parse_caller
from polybus.server.rule_set import IN_MEMORY, RuleEntry, RuleSet

if TYPE_CHECKING:
    from polybus.bus.quotas import Quotas
    from polybus.server.config import LoadedSettings

CREATORS_VERBS = frozenset({PRODUCE, SUBSCRIBE, DELETE})
MAX_CREATOR_RULES = 256  # the share of one user, or one node, of the table


class AclAdmin:
    """`path` is that of acl.toml; None: a bus without a data folder, which keeps nothing."""

    def __init__(
        self,
        policy: Policy,
        quotas: Quotas,
        creator_of: Callable[[bytes], Identity | None],
        path: Path | None,
        log: Any,
    ) -> None:
        self._policy = policy
        self._quotas = quotas
        self._creator_of = creator_of
        self._path = path
        self._log = log
        self._rules = RuleSet()
        self._turn = asyncio.Lock()  # changes and reloads come one after another

    def start(self, loaded: LoadedSettings) -> None:
        """Read all rules before the first connection. Raises `ConfigError`."""
        self._apply(
            loaded, rule_set.load_rule_set(loaded, self._path), rule_set.load_user_quotas(loaded)
        )

    async def reload(self, loaded: LoadedSettings) -> int:
        """Read all files again. Returns the number of rules. A `ConfigError` changes nothing."""
        again = loaded.again or (lambda: loaded)
        async with self._turn:
            self._apply(*await asyncio.to_thread(_read_all, again, self._path))
        return len(self._rules.entries)

    def is_admin(self, identity: Identity) -> bool:
        """Of the whole bus."""
        return self._policy.allows(identity, ADMIN, ANY_TOPIC)

    def verbs(self) -> dict[str, AdminVerb]:
        rule = frozenset({"rule"})
        return {
            "acl_ls": AdminVerb(self._ls, for_everyone=True, keys=frozenset({"topic"})),
            "acl_add": AdminVerb(self._add, for_everyone=True, keys=rule),
            "acl_rm": AdminVerb(self._rm, for_everyone=True, keys=rule),
            "acl_test": AdminVerb(
                self._test, for_everyone=True, keys=frozenset({"who", "action", "topic"})
            ),
        }

    # --- the verbs

    def _ls(self, request: Request, identity: Identity) -> list[dict[str, Any]]:
        topic = _text(request, "topic").encode() if "topic" in request else None
        if not self._may_list(identity, topic):
            raise AdminError(
                "denied", "listing all rules is for admins; creators may list a topic's"
            )
        return [
            {
                "rule": str(entry.rule),
                "source": entry.placed.source,
                "by": entry.by,
                "names_nobody": entry.names_nobody,
            }
            for entry in self._rules.entries
            if topic is None or Pattern(entry.rule.pattern).matches(topic)
            if not identity.node or entry.rule.who.kind == NODE
        ]

    async def _add(self, request: Request, identity: Identity) -> dict[str, Any]:
        rule = _rule(request)
        by = self._check_may_set(rule, identity)
        async with self._turn:
            there = self._rules.find(rule)
            if there is not None and (there.by is None or by is not None):
                return self._rule_result(rule, changed=False)
            self._check_room(by)
            entry = RuleEntry(await asyncio.to_thread(_place, rule, self._source), by)
            await self._change(self._rules.with_entry(entry))
        self._log.info("rule added", rule=str(rule), user=identity.name)
        return self._rule_result(rule, changed=True)

    async def _rm(self, request: Request, identity: Identity) -> dict[str, Any]:
        rule = _rule(request)
        by = self._check_may_set(rule, identity)
        async with self._turn:
            there = self._rules.find(rule)
            if there is None:
                raise AdminError("not_found", f'there is no rule "{rule}"')
            if by is not None and there.by is None:
                raise AdminError("denied", "that rule was set by an admin")
            if there not in self._rules.kept:
                place = there.placed.source
                raise AdminError(
                    "refused", f"that rule is in {place}: remove it there, then SIGHUP"
                )
            await self._change(self._rules.without(rule))
        self._log.info("rule removed", rule=str(rule), user=identity.name)
        return self._rule_result(rule, changed=True)

    async def _test(self, request: Request, _identity: Identity) -> dict[str, Any]:
        verb, topic = check_verb(_text(request, "action")), _text(request, "topic").encode()
        who = await asyncio.to_thread(parse_caller, _text(request, "who"))
        verdict = self._policy.decide(who, verb, topic, self._creator_of(topic))
        rule = str(verdict.by.rule) if verdict.by else None
        return {"allowed": verdict.allowed, "why": verdict.why, "rule": rule}

    # --- inside

    def _apply(self, loaded: LoadedSettings, rules: RuleSet, own: dict[int, Any]) -> None:
        self._quotas.configure(loaded.settings.quotas, own)
        self._install(rules)
        for entry in rules.entries:
            if entry.names_nobody:
                self._log.warning("rule matches no caller", rule=str(entry.rule))

    def _install(self, rules: RuleSet) -> None:
        self._rules = rules
        self._policy.replace(rules.placed)

    async def _change(self, rules: RuleSet) -> None:
        if self._path is not None:
            try:
                await asyncio.to_thread(rule_set.write, self._path, rules)
            except OSError as error:
                reason = f"{self._path} cannot be written: {error.strerror}"
                raise AdminError("unavailable", f"nothing was changed: {reason}") from None
        self._install(rules)

    def _may_list(self, identity: Identity, topic: bytes | None) -> bool:
        if identity.node or (topic is not None and identity.owns(self._creator_of(topic))):
            return True  # a node gets the rules for nodes
        return self._policy.allows(identity, ADMIN, ANY_TOPIC if topic is None else topic)

    def _check_may_set(self, rule: Rule, identity: Identity) -> int | str | None:
        """Return None for an admin, the uid of the topic's creator, or the name of a node.

        Raises `AdminError`.
        """
        if identity.node:
            if rule.who.kind != NODE:
                raise AdminError("denied", f"a node sets rules for nodes only, got {rule.who}")
            return identity.name
        if self.is_admin(identity):
            return None
        # A star of this pattern matches only a star of the admin rule, so a rule that covers the
        # pattern's text covers every name that the pattern matches.
        within = rule.pattern.encode()
        if ADMIN not in rule.verbs and self._policy.allows(identity, ADMIN, within):
            return None
        # Those of dead letters are for the creator of their topic. Else a user could create
        # `orders.dlq` before there is `orders`, and leave a rule that opens it.
        source = topic_name.dead_letter_source(within)
        owner = self._creator_of(within if source is None else source)
        if not rule.is_exact or not identity.owns(owner):
            self._log.warning("denied", dialect="admin", user=identity.name, rule=str(rule))
            raise AdminError("denied", f"rules for {rule.pattern!r} are for admins and its creator")
        if not CREATORS_VERBS.issuperset(rule.verbs):
            verbs = ", ".join(sorted(CREATORS_VERBS))
            raise AdminError("denied", f"a topic's creator sets rules for {verbs} only")
        if identity.uid is None:  # a stored rule names the uid of its creator
            raise AdminError("not_supported", "only users of this host set rules for their topics")
        return identity.uid

    def _check_room(self, by: int | str | None) -> None:
        kept = self._rules.kept
        if len(kept) >= MAX_RULES:
            raise AdminError("limit_reached", f"there are {MAX_RULES} rules already: remove some")
        if by is not None and sum(entry.by == by for entry in kept) >= MAX_CREATOR_RULES:
            raise AdminError(
                "limit_reached", f"you have set {MAX_CREATOR_RULES} rules: remove some"
            )

    @property
    def _source(self) -> str:
        return ACL_NAME if self._path else IN_MEMORY

    def _rule_result(self, rule: Rule, *, changed: bool) -> dict[str, Any]:
        return {"rule": str(rule), "changed": changed, "kept": self._path is not None}


def _read_all(
    again: Callable[[], LoadedSettings], path: Path | None
) -> tuple[LoadedSettings, RuleSet, dict[int, Any]]:
    loaded = again()
    return loaded, rule_set.load_rule_set(loaded, path), rule_set.load_user_quotas(loaded)


def _place(rule: Rule, source: str) -> PlacedRule:
    try:
        return rule_set.resolve_rule(rule, source)
    except ConfigError:
        raise AdminError("not_found", rule_set.unknown_name_text(rule.who)) from None


def _rule(request: Request) -> Rule:
    try:
        return Rule.parse(_text(request, "rule"))
    except InvalidRule as error:
        raise AdminError("invalid_rule", str(error)) from None


def _text(request: Request, key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise AdminError("bad_request", f"{key} must be a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise AdminError("bad_request", f"{key} must be valid Unicode text") from None
    return value
