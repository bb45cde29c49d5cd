"""The rules in force, and where each is written: in the config, or in `acl.toml`.

A user or group that the host does not know is an error in the config and in a new rule. In
`acl.toml` it is not, because the user may have been removed later. Such a rule stays and
matches no caller; an allow rule still closes its topics to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polybus.bus.rule_table import PlacedRule
from polybus.errors import ConfigError
from polybus.model.access_rule import NUMBERED, USER, Principal, Rule
from polybus.server import acl_file
from polybus.server.acl_file import ACL_NAME, StoredRule
from polybus.server.config import DEFAULT, LoadedSettings
from polybus.server.user_directory import gid_of, uid_of

IN_MEMORY = "memory"  # the place of rules that were added to a bus without a data folder


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One rule of the set. `by` is as in `StoredRule`; None for rules of the config."""

    placed: PlacedRule
    by: int | str | None = None

    @property
    def rule(self) -> Rule:
        return self.placed.rule

    @property
    def names_nobody(self) -> bool:
        return self.rule.who.kind in NUMBERED and self.placed.number is None


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All rules. A change makes a new set, so a failed change leaves the old one."""

    config: tuple[RuleEntry, ...] = ()
    kept: tuple[RuleEntry, ...] = ()

    @property
    def entries(self) -> tuple[RuleEntry, ...]:
        return self.config + self.kept

    @property
    def placed(self) -> tuple[PlacedRule, ...]:
        return tuple(entry.placed for entry in self.entries)

    def find(self, rule: Rule) -> RuleEntry | None:
        """Return the entry of a rule; the stored one, if the config has it too."""
        return next((one for one in (*self.kept, *self.config) if one.rule == rule), None)

    def with_entry(self, entry: RuleEntry) -> RuleSet:
        return replace(self, kept=(*self.without(entry.rule).kept, entry))

    def without(self, rule: Rule) -> RuleSet:
        return replace(self, kept=tuple(one for one in self.kept if one.rule != rule))


def load_rule_set(loaded: LoadedSettings, path: Path | None) -> RuleSet:
    """Read all rules. Blocks. Raises `ConfigError` for an invalid one."""
    source = loaded.sources.get("acl", DEFAULT)
    config = tuple(RuleEntry(resolve_rule(rule, source)) for rule in loaded.settings.acl)
    stored = {one.rule: one for one in (acl_file.read_rules(path) if path else ())}
    kept = (
        RuleEntry(PlacedRule(one.rule, ACL_NAME, look_up_number(one.rule.who)), one.by)
        for one in stored.values()
    )
    return RuleSet(config, tuple(kept))


def write(path: Path, rules: RuleSet) -> None:
    acl_file.write_rules(path, (StoredRule(entry.rule, entry.by) for entry in rules.kept))


def resolve_rule(rule: Rule, source: str) -> PlacedRule:
    """Return the rule with its uid or gid. Raises `ConfigError` if the host does not know it."""
    number = look_up_number(rule.who)
    if number is None and rule.who.kind in NUMBERED:
        raise ConfigError(f'{source}: rule "{rule}": {unknown_name_text(rule.who)}')
    return PlacedRule(rule, source, number)


def look_up_number(who: Principal) -> int | None:
    """Return the uid or gid of a name, None if there is none. Raises `ConfigError`."""
    if who.kind not in NUMBERED or who.number is not None:
        return who.number
    try:
        return uid_of(who.name) if who.kind == USER else gid_of(who.name)
    except OSError as error:
        raise ConfigError(f"cannot look up {who.kind} {who.name!r}: {error.strerror}") from error


def unknown_name_text(who: Principal) -> str:
    return f"this host has no {who.kind} called {who.name!r}"


def load_user_quotas(loaded: LoadedSettings) -> dict[int, Mapping[str, int]]:
    """Return `[quotas.users]` by uid. Blocks. Raises `ConfigError` for an unknown user."""
    found: dict[int, Mapping[str, int]] = {}
    source = loaded.sources.get("quotas.users", DEFAULT)
    for name, own in loaded.settings.quotas.users.items():
        who = Principal(USER, name)
        uid = look_up_number(who)
        if uid is None:
            raise ConfigError(f"{source}: [quotas.users]: {unknown_name_text(who)}")
        if uid in found:
            raise ConfigError(
                f"{source}: [quotas.users]: user {uid} ({name}) must appear once, got twice"
            )
        found[uid] = own
    return found
