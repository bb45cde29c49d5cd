"""What an action takes, said once: read from here by the check of requests, the list of
actions and the test that compares the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from polybus.errors import MalformedRequest

Arguments = dict[str, Any]
Answer = dict[str, Any]

MAX_INTEGER = 2**63 - 1
REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a request. `kind` is one of `KINDS`; without a default it must be there."""

    name: str
    kind: str
    meaning: str
    default: object = REQUIRED

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED


@dataclass(frozen=True, slots=True)
class ActionSchema:
    """`answers` says in words what comes back."""

    name: str
    meaning: str
    fields: tuple[Field, ...]
    answers: str

    def read(self, request: Mapping[str, object]) -> Arguments:
        """The arguments with defaults filled in, or `MalformedRequest` naming what is wrong."""
        unknown = sorted(request.keys() - {field.name for field in self.fields})
        if unknown:
            raise MalformedRequest(f"{self.name} takes no {unknown[0][:64]!r}")
        return {field.name: self._value(field, request) for field in self.fields}

    def _value(self, field: Field, request: Mapping[str, object]) -> object:
        value = request.get(field.name)
        if value is None:
            if field.is_required:
                raise MalformedRequest(f"{self.name} needs {field.name}: {field.meaning}")
            return field.default
        what, check = KINDS[field.kind]
        if not check(value):
            raise MalformedRequest(f"{self.name}: {field.name} is {what}, not {_short(value)}")
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 64 else text[:64] + "…"


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER  # a bool is an int by isinstance


def is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_INTEGER
    )


KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "text": ("a string", is_text),
    "texts": ("a list of strings", lambda v: isinstance(v, list) and all(map(is_text, v))),
    "count": ("an integer from 0 on", is_count),
    "seconds": ("a number above 0", _is_positive),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "object": ("an object", lambda v: isinstance(v, dict)),
    "objects": (
        "a list of objects",
        lambda v: isinstance(v, list) and all(isinstance(one, dict) for one in v),
    ),
    "shard": ('a shard\'s number, or "all"', lambda v: v == "all" or is_count(v)),
    "target": ("a string or an object", lambda v: is_text(v) or isinstance(v, dict)),
}
