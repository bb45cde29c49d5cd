"""`acl.toml`: the rules that were added while the bus ran, kept in the data folder.

    [[acl]]
    rule = "allow user:alice produce,subscribe orders.*"

    [[acl]]
    rule = "deny everyone produce mine"
    by = 1000          # set by the topic's creator, or by "node:0x…"; without it, by an admin

The bus writes a new file beside the old one, syncs it and renames it. A crash in between
leaves one of the two.
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybus.errors import ConfigError, InvalidRule
from polybus.model.access_rule import Rule

ACL_NAME = "acl.toml"
NEW_SUFFIX = ".new"
MAX_RULES = 4096  # the bus reads and writes all of them at once
MAX_FILE_BYTES = 32 * 1024 * 1024  # more than that many of the longest rules
HEADING = """\
# Rules set with `polybus acl add`. The bus rewrites this file whenever they change;
# after an edit by hand send it SIGHUP at once, or stop it before.
"""


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule in the file.

    `by` is the uid of a topic's creator, or `node:` and the id of a node; None: an admin set it.
    """

    rule: Rule
    by: int | str | None = None


def read_rules(path: Path) -> tuple[StoredRule, ...]:
    """Return the rules of the file; none without a file. Raises `ConfigError` if it is invalid."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_FILE_BYTES} bytes")
        table = tomllib.loads(raw.decode("utf-8"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    entries = table.pop("acl", [])
    if table:
        raise ConfigError(f"{path}: has {next(iter(table))!r}, where only [[acl]] belongs")
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: acl is a list of tables, written [[acl]]")
    if len(entries) > MAX_RULES:
        raise ConfigError(f"{path}: has {len(entries)} rules, and {MAX_RULES} are allowed")
    return tuple(_entry(f"{path}: [[acl]] {n}", entry) for n, entry in enumerate(entries, start=1))


def write_rules(path: Path, kept: Iterable[StoredRule]) -> None:
    """Replace the file. If it raises `OSError`, the old file is unchanged."""
    new = path.with_name(path.name + NEW_SUFFIX)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(HEADING + "".join(map(_shown, kept)))
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    _sync(path.parent)


def _entry(place: str, entry: Any) -> StoredRule:
    if not isinstance(entry, dict) or not isinstance(entry.get("rule"), str):
        raise ConfigError(f'{place}: lacks rule = "..."')
    by = entry.get("by")
    is_user, is_node = type(by) is int and by >= 0, isinstance(by, str) and by.startswith("node:")
    if by is not None and not is_user and not is_node:
        raise ConfigError(f"{place}: by is the number of a user, or a node, not {by!r}")
    unknown = sorted(entry.keys() - {"rule", "by"})
    if unknown:
        raise ConfigError(f"{place}: has no key {unknown[0]!r}")
    try:
        return StoredRule(Rule.parse(entry["rule"]), by)
    except InvalidRule as error:
        raise ConfigError(f"{place}: {error}") from None


def _shown(kept: StoredRule) -> str:
    rule = json.dumps(str(kept.rule), ensure_ascii=False)  # a string of JSON is one of TOML
    by = "" if kept.by is None else f"by = {json.dumps(kept.by)}\n"
    return f"\n[[acl]]\nrule = {rule}\n{by}"


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
