"""Description of requests: a dataclass per action, with a checked table of its fields.

A request class is the single text about an action. The port decodes requests with it, the
client encodes them with it, `list_actions` and docs/spec/native.md show it:

    @action("topic.drop", "Drop a topic", answer="nothing")
    class TopicDrop(Request[Empty]):
        topic: str = param("text", "name of the topic")

The tables are built at import, so decoding a request is one pass over its keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Self,
    TypeVar,
    dataclass_transform,
)

from polybus.errors import MalformedRequest

if TYPE_CHECKING:
    from polybus.native.protocol.answers import Answer

A = TypeVar("A", bound="Answer")
R = TypeVar("R", bound="Request[Any]")

MAX_INTEGER = 2**63 - 1
REQUIRED: Final = dataclasses.MISSING
_FIELD: Final = "polybus.field"  # key of dataclass metadata


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a request. `kind` is one of `KINDS`; without a default it is required."""

    name: str  # on the wire
    attribute: str
    kind: str
    meaning: str
    default: object = REQUIRED

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED


class Request(Generic[A]):
    """A request of the native port. Its answer has the type `A`."""

    __slots__ = ()
    action_name: ClassVar[str]
    meaning: ClassVar[str]
    answer: ClassVar[str]
    fields: ClassVar[Mapping[str, Field]]
    _required: ClassVar[tuple[Field, ...]]

    @classmethod
    def decode(cls, wire: Mapping[str, object]) -> Self:
        """Return the request with defaults filled in.

        Raises:
            MalformedRequest: a field is unknown, missing or of the wrong kind.
        """
        fields = cls.fields
        if not wire.keys() <= fields.keys():
            unknown = min(wire.keys() - fields.keys())
            raise MalformedRequest(f"{cls.action_name} takes no {unknown[:64]!r}")
        for field in cls._required:
            if wire.get(field.name) is None:
                raise MalformedRequest(f"{cls.action_name} needs {field.name}: {field.meaning}")
        values = {}
        for name, value in wire.items():
            if value is None:  # null is the same as leaving the field out
                continue
            field = fields[name]
            expected, check = KINDS[field.kind]
            if not check(value):
                text = f"{cls.action_name}: {name} must be {expected}, got {_short(value)}"
                raise MalformedRequest(text)
            values[field.attribute] = value
        return cls(**values)

    def encode(self) -> dict[str, Any]:
        """Return the request as an object for JSON, without fields that have their default."""
        values = ((field, getattr(self, field.attribute)) for field in self.fields.values())
        return {field.name: value for field, value in values if value != field.default}


def param(kind: str, meaning: str, *, default: Any = REQUIRED, wire: str = "") -> Any:
    """Describe a field of a request. `wire` is its name there if it is not the attribute's."""
    return dataclasses.field(default=default, metadata={_FIELD: (wire, kind, meaning)})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(param,))
def action(name: str, meaning: str, *, answer: str) -> Callable[[type[R]], type[R]]:
    """Make a class the request of an action. `answer` describes the answer in words."""

    def decorate(cls: type[R]) -> type[R]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        fields = []
        for one in dataclasses.fields(made):  # type: ignore[arg-type]
            wire, kind, text = one.metadata[_FIELD]
            fields.append(Field(wire or one.name, one.name, kind, text, one.default))
        made.action_name, made.meaning, made.answer = name, meaning, answer
        made.fields = {field.name: field for field in fields}
        made._required = tuple(field for field in fields if field.is_required)
        return made

    return decorate


def parse_shard_number(text: str, field: str) -> int:
    """Return the shard number that is a key of a JSON object.

    Raises:
        MalformedRequest: the key is not a decimal number.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise MalformedRequest(f"{field}: {text[:64]!r} is not a shard number")
    return int(text)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 64 else text[:64] + "…"


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER  # a bool is an int by isinstance


def is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()  # JSON may contain lone surrogates, which are not text
    except UnicodeEncodeError:
        return False
    return True


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_INTEGER
    )


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "text": ("a string", is_text),
    "texts": ("a list of strings", lambda v: isinstance(v, list) and all(map(is_text, v))),
    "count": ("an integer >= 0", is_count),
    "seconds": ("a number > 0", _is_positive),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "object": ("an object", lambda v: isinstance(v, dict)),
    "objects": ("a list of objects", _is_list_of_objects),
    "shard": ('a shard number or "all"', lambda v: v == "all" or is_count(v)),
    "target": ("a string or an object", lambda v: is_text(v) or isinstance(v, dict)),
}
