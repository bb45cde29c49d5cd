"""Description of requests: a class per action, with typed fields.

A request class is the single text about an action. The port decodes requests with it, the
client encodes them with it, `list_actions` and docs/spec/native.md show it:

    class TopicDrop(Request[Empty], action="topic.drop", answer="nothing"):
        \"""Drop a topic.\"""

        topic: Text = param("name of the topic")

The type of a field contains its `Kind`, which checks values that come from the wire. The
table of fields is built at import, so decoding a request is one pass over its keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

from polybus.errors import MalformedRequest
from polybus.model.topic import All

if TYPE_CHECKING:
    from polybus.native.protocol.answers import Answer

A = TypeVar("A", bound="Answer")

MAX_INTEGER = 2**63 - 1
REQUIRED: Final = dataclasses.MISSING


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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= MAX_INTEGER  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that a field accepts; `expected` describes them in errors."""

    name: str
    expected: str
    accepts: Callable[[object], bool]


KINDS: dict[str, Kind] = {}


def _kind(name: str, expected: str, accepts: Callable[[object], bool]) -> Kind:
    kind = KINDS[name] = Kind(name, expected, accepts)
    return kind


Text = Annotated[str, _kind("text", "a string", is_text)]
Texts = Annotated[
    list[str],
    _kind("texts", "a list of strings", lambda v: isinstance(v, list) and all(map(is_text, v))),
]
Count = Annotated[int, _kind("count", "an integer >= 0", is_count)]
Seconds = Annotated[float, _kind("seconds", "a number > 0", _is_positive)]
Flag = Annotated[bool, _kind("flag", "true or false", lambda v: isinstance(v, bool))]
Object = Annotated[dict[str, Any], _kind("object", "an object", lambda v: isinstance(v, dict))]
Objects = Annotated[
    list[dict[str, Any]],
    _kind(
        "objects",
        "a list of objects",
        lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v),
    ),
]
ShardOrAll = Annotated[
    int | All, _kind("shard", 'a shard number or "all"', lambda v: v == "all" or is_count(v))
]
Target = Annotated[
    str | dict[str, Any],
    _kind("target", "a string or an object", lambda v: is_text(v) or isinstance(v, dict)),
]


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a request. Without a default it is required."""

    name: str  # on the wire
    attribute: str
    kind: Kind
    meaning: str
    default: object = REQUIRED


def param(meaning: str, *, default: Any = REQUIRED, wire: str = "") -> Any:
    """Describe a field of a request. `wire` is its name there if it is not the attribute's."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "wire": wire})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(param,))
class Request(Generic[A]):
    """A request of the native port. Its answer has the type `A`.

    A subclass is a frozen dataclass. With `action` it is a request, without it a part that
    several requests have in common. The docstring is the meaning of the action.
    """

    action_name: ClassVar[str]
    meaning: ClassVar[str]
    answer: ClassVar[str]  # described in words
    fields: ClassVar[Mapping[str, Field]]  # by name on the wire
    _required: ClassVar[tuple[Field, ...]]

    def __init_subclass__(cls, *, action: str = "", answer: str = "") -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        hints = get_type_hints(cls, include_extras=True)
        fields = []
        for each in dataclasses.fields(cls):  # type: ignore[arg-type]
            # An optional field has the type `Kind | None`: the kind is one level deeper.
            hint = hints[each.name]
            kind = next(part.__metadata__[0] for part in (hint, *get_args(hint)) if _has_kind(part))
            name, meaning = each.metadata["wire"] or each.name, each.metadata["meaning"]
            fields.append(Field(name, each.name, kind, meaning, each.default))
        cls.action_name, cls.answer = action, answer
        cls.meaning = " ".join((cls.__doc__ or "").split()).removesuffix(".")
        cls.fields = {field.name: field for field in fields}
        cls._required = tuple(field for field in fields if field.default is REQUIRED)

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
            if not field.kind.accepts(value):
                shown = repr(value)
                shown = shown if len(shown) <= 64 else shown[:64] + "…"
                text = f"{cls.action_name}: {name} must be {field.kind.expected}, got {shown}"
                raise MalformedRequest(text)
            values[field.attribute] = value
        return cls(**values)

    def encode(self) -> dict[str, Any]:
        """Return the request as an object for JSON, without fields that have their default."""
        values = ((field, getattr(self, field.attribute)) for field in self.fields.values())
        return {field.name: value for field, value in values if value != field.default}


def _has_kind(hint: Any) -> bool:
    return isinstance(getattr(hint, "__metadata__", (None,))[0], Kind)


def parse_shard_number(text: str, field: str) -> int:
    """Return the shard number that is a key of a JSON object.

    Raises:
        MalformedRequest: the key is not a decimal number.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise MalformedRequest(f"{field}: {text[:64]!r} is not a shard number")
    return int(text)
