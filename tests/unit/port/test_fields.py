"""What an action takes: checked by its table, named in the error."""

from __future__ import annotations

from typing import Any

import pytest

from polybus.errors import MalformedRequest
from polybus.native.protocol.fields import KINDS, MAX_INTEGER, ActionSchema, Field

ACTION = ActionSchema(
    "do",
    "Does",
    (Field("name", "text", "whose"), Field("count", "count", "how many", 7)),
    "nothing",
)


def test_defaults_are_filled_in():
    assert ACTION.read({"name": "x"}) == {"name": "x", "count": 7}
    assert ACTION.read({"name": "x", "count": None}) == {"name": "x", "count": 7}
    assert ACTION.read({"name": "", "count": 0}) == {"name": "", "count": 0}


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({}, "do needs name: whose"),
        ({"name": None}, "do needs name: whose"),
        ({"name": 1}, "do: name is a string, not 1"),
        ({"name": "x", "more": 1}, "do takes no 'more'"),
        ({"name": "x", "count": "9" * 100}, "do: count is an integer from 0 on, not '999"),
    ],
)
def test_what_is_wrong_is_named(request_, says):
    with pytest.raises(MalformedRequest) as caught:
        ACTION.read(request_)
    assert str(caught.value).startswith(says)
    assert len(str(caught.value)) < 200


GOOD: dict[str, list[Any]] = {
    "text": ["", "ä"],
    "texts": [[], ["a", "b"]],
    "count": [0, MAX_INTEGER],
    "seconds": [0.1, 1, MAX_INTEGER],
    "flag": [True, False],
    "object": [{}, {"a": 1}],
    "objects": [[], [{}]],
    "shard": [0, 5, "all"],
    "target": ["latest", {"id": 1}],
}
BAD: dict[str, list[Any]] = {
    "text": [1, b"x", [], "\ud800"],
    "texts": ["x", [1], [None], ["\ud800"]],
    "count": [-1, 1.0, True, "1", MAX_INTEGER + 1],
    "seconds": [0, -1, True, float("nan"), float("inf"), "1"],
    "flag": [0, 1, "true"],
    "object": [[], "x", 1],
    "objects": [{}, [1], "x", [[]]],
    "shard": [-1, True, "any", 1.0, [], {}],
    "target": [1, [], "\ud800"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    _, check = KINDS[kind]
    assert all(check(value) for value in GOOD[kind])
    assert not any(check(value) for value in BAD[kind])
