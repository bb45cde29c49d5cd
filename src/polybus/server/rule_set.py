"""The rules in force, and where each is written: in the config, or in `acl.toml`.

A user or group that the host does not know is an error where somebody has just
written it. In `acl.toml` it is not: the user may have been removed since. Such a
rule stays, and names nobody; an allow rule goes on closing what it closes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polybus.bus.rule_table import Placed
from polybus.errors import ConfigError
from polybus.model.access_rule import NUMBERED, USER, Rule, Who
from polybus.server import acl_file
from polybus.server.acl_file import ACL_NAME, Kept
from polybus.server.config import DEFAULT, Loaded
from polybus.server.user_directory import gid_of, uid_of

IN_MEMORY = "memory"  # where rules are that a bus without a data folder was given


@dataclass(frozen=True, slots=True)
class Entry:
    """One rule of the book; `by` as in `aclfile`, None also for the config's."""

    placed: Placed
    by: int | None = None

    @property
    def rule(self) -> Rule:
        return self.placed.rule

    @property
    def names_nobody(self) -> bool:
        return self.rule.who.kind in NUMBERED and self.placed.number is None


@dataclass(frozen=True, slots=True)
class Book:
    """All rules. A change makes a new book, so that a failed one leaves the old."""

    config: tuple[Entry, ...] = ()
    kept: tuple[Entry, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.config + self.kept

    @property
    def placed(self) -> tuple[Placed, ...]:
        return tuple(entry.placed for entry in self.entries)

    def find(self, rule: Rule) -> Entry | None:
        """The entry of this rule; one that was added, if it is in both places."""
        return next((one for one in (*self.kept, *self.config) if one.rule == rule), None)

    def with_entry(self, entry: Entry) -> Book:
        return replace(self, kept=(*self.without(entry.rule).kept, entry))

    def without(self, rule: Rule) -> Book:
        return replace(self, kept=tuple(one for one in self.kept if one.rule != rule))


def open_book(loaded: Loaded, path: Path | None) -> Book:
    """Everything as it is written now. Blocks; `ConfigError` if something is wrong."""
    source = loaded.sources.get("acl", DEFAULT)
    config = tuple(Entry(placed(rule, source)) for rule in loaded.settings.acl)
    return Book(config, _kept(acl_file.read(path) if path else ()))


def write(path: Path, book: Book) -> None:
    acl_file.write(path, (Kept(entry.rule, entry.by) for entry in book.kept))


def placed(rule: Rule, source: str) -> Placed:
    """The rule with the number of whom it names; `ConfigError` if this host has no such."""
    number = number_of(rule.who)
    if number is None and rule.who.kind in NUMBERED:
        raise ConfigError(f'{source}: rule "{rule}": {no_such(rule.who)}')
    return Placed(rule, source, number)


def number_of(who: Who) -> int | None:
    if who.kind not in NUMBERED or who.number is not None:
        return who.number
    return uid_of(who.name) if who.kind == USER else gid_of(who.name)


def no_such(who: Who) -> str:
    return f"this host has no {who.kind} called {who.name!r}"


def user_quotas(loaded: Loaded) -> dict[int, Mapping[str, int]]:
    """`[quotas.users]` by uid. Blocks; `ConfigError` for a user that is not there."""
    found: dict[int, Mapping[str, int]] = {}
    source = loaded.sources.get("quotas.users", DEFAULT)
    for name, own in loaded.settings.quotas.users.items():
        who = Who(USER, name)
        uid = number_of(who)
        if uid is None:
            raise ConfigError(f"{source}: [quotas.users]: {no_such(who)}")
        if uid in found:
            raise ConfigError(f"{source}: [quotas.users]: {name} is user {uid}, who is there twice")
        found[uid] = own
    return found


def _kept(kept: tuple[Kept, ...]) -> tuple[Entry, ...]:
    distinct = {one.rule: one for one in kept}
    return tuple(
        Entry(Placed(one.rule, ACL_NAME, number_of(one.rule.who)), one.by)
        for one in distinct.values()
    )
