"""One value of the configuration: from its text or TOML value to its type.

TOML gives typed values, the environment and flags give text; both end as the
type of the dataclass field. `InvalidValue` has the expected value as
text; the caller adds the source.
"""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NewType, Union, get_args, get_origin

from polybus.durable.retention_limits import parse_limit
from polybus.errors import InvalidRule, UsageError
from polybus.model.access_rule import Rule
from polybus.model.byte_size import parse_size_bytes
from polybus.model.duration import parse_duration_ms
from polybus.model.limits import QuotaLimits, UserQuotas

RULES = tuple[Rule, ...]
Duration = NewType("Duration", str)  # as in 7d, or none
ByteSize = NewType("ByteSize", str)  # as in 10GiB, or none

WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class InvalidValue(Exception):
    """A value of the wrong type or range; the text describes the expected value."""


def from_toml(value: Any, kind: Any, base: Path) -> Any:
    """Convert a TOML value to `kind`. Relative paths are relative to `base`."""
    kind = _without_none(kind)
    if get_origin(kind) is Literal:
        return _choice(value, get_args(kind))
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InvalidValue("a list of strings")
        return tuple(map(_rule, value)) if kind == RULES else tuple(value)
    if kind == UserQuotas:
        return _user_quotas(value)
    if get_origin(kind) is Mapping:
        return _texts(value)
    if kind is Path:
        return _path(value, base)
    if kind in QUANTITIES:
        return _quantity(value, kind)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise InvalidValue(NOUNS[kind])
    return value


def from_text(text: str, kind: Any) -> Any:
    """Convert text from the environment or a flag to `kind`."""
    kind = _without_none(kind)
    if get_origin(kind) is tuple:
        mark = ";" if kind == RULES else ","  # a rule has commas itself
        items = [item.strip() for item in text.split(mark) if item.strip()]
        return from_toml(items, kind, Path())
    if kind == UserQuotas:
        return _user_quotas(_toml_value(text))
    if get_origin(kind) is Mapping:
        return {item.strip(): item.strip() for item in text.split(",") if item.strip()}
    if kind is bool:
        if text.lower() not in WORDS:
            raise InvalidValue("true or false")
        return WORDS[text.lower()]
    if kind in (int, float):
        return _number(text, kind)
    return from_toml(text, kind, Path())


def check_bounds(value: Any, kind: Any, bounds: tuple[float, float] | None) -> None:
    """Raise `InvalidValue` for a number outside its bounds, infinity and NaN included."""
    if kind not in (int, float):
        return
    if not math.isfinite(value):
        raise InvalidValue("a finite number")
    low, high = bounds or ((1, math.inf) if kind is int else (0, math.inf))
    open_start = bounds is None and kind is float
    if value < low or value > high or (open_start and value == low):
        raise InvalidValue(f"{NOUNS[kind]} {_range_words(low, high, open_start)}")


NOUNS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
}


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind


def _choice(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidValue("one of " + ", ".join(allowed))
    return str(value)


def _rule(line: str) -> Rule:
    try:
        return Rule.parse(line)
    except InvalidRule as error:
        raise InvalidRule(f"{line!r}: {error}") from None


def _user_quotas(value: Any) -> UserQuotas:
    known = {field.name for field in fields(QuotaLimits)} - {"users"}
    if not isinstance(value, dict) or not all(isinstance(own, dict) for own in value.values()):
        raise InvalidValue("a table of users, each with some of " + ", ".join(sorted(known)))
    for user, own in value.items():
        for quota, amount in own.items():
            if quota not in known:
                raise InvalidValue(f"for {user} only {', '.join(sorted(known))}")
            if type(amount) is not int or amount < 0:
                raise InvalidValue(f"for {user} {quota} = a whole number of at least 0")
    return value


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise InvalidValue("a table of strings")
    return value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise InvalidValue("a table in TOML, as in {alice = {quota_topics = 10}}") from None


QUANTITIES: dict[Any, tuple[Callable[[str], int], str]] = {
    Duration: (parse_duration_ms, 'a duration as in "7d" (ms, s, m, h, d), or "none"'),
    ByteSize: (parse_size_bytes, 'a size as in "10GiB" (KiB, MiB, GiB), or "none"'),
}


def _quantity(value: Any, kind: Any) -> str:
    parse, noun = QUANTITIES[kind]
    try:
        if isinstance(value, str):
            parse_limit(value, parse)
            return value
    except UsageError:
        pass
    raise InvalidValue(noun)


def _path(value: Any, base: Path) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidValue(NOUNS[Path])
    try:
        return base / Path(value).expanduser()
    except RuntimeError:
        raise InvalidValue("a path (with a '~' that is the home of a user)") from None


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InvalidValue(NOUNS[kind]) from None


def _range_words(low: float, high: float, open_start: bool) -> str:
    if open_start:
        return f"above {low:g}"
    if math.isinf(high):
        return f"of at least {int(low)}"
    return f"from {int(low)} to {int(high)}"
