"""Requests are checked against their table of fields; errors name the field."""

from __future__ import annotations

from typing import Any

import pytest

from polybus.errors import MalformedRequest
from polybus.native.protocol.answers import Empty
from polybus.native.protocol.fields import KINDS, MAX_INTEGER, Count, Request, Text, param


class Do(Request[Empty], action="do", answer="nothing"):
    """Do it."""

    name: Text = param("whose")
    count: Count = param("how many", default=7)
    start: Count | None = param("where", default=None, wire="from")


def test_defaults_are_filled_in():
    assert Do.decode({"name": "x"}) == Do(name="x", count=7)
    assert Do.decode({"name": "x", "count": None}) == Do(name="x", count=7)
    assert Do.decode({"name": "", "count": 0}) == Do(name="", count=0)
    assert Do.decode({"name": "", "from": 0}) == Do(name="", start=0)


@pytest.mark.parametrize(
    ("request_", "wire"),
    [
        (Do(name="x"), {"name": "x"}),
        (Do(name="", count=0, start=0), {"name": "", "count": 0, "from": 0}),
        (Do(name="x", count=7), {"name": "x"}),
    ],
)
def test_encoded_request_omits_defaults_and_decodes_to_itself(request_, wire):
    assert request_.encode() == wire
    assert Do.decode(wire) == request_


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({}, "do needs name: whose"),
        ({"name": None}, "do needs name: whose"),
        ({"name": 1}, "do: name must be a string, got 1"),
        ({"name": "x", "more": 1}, "do takes no 'more'"),
        ({"name": "x", "count": "9" * 100}, "do: count must be an integer >= 0, got '999"),
    ],
)
def test_error_names_the_malformed_field(request_, says):
    with pytest.raises(MalformedRequest) as caught:
        Do.decode(request_)
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
def test_kind_accepts_and_refuses(kind):
    accepts = KINDS[kind].accepts
    assert all(accepts(value) for value in GOOD[kind])
    assert not any(accepts(value) for value in BAD[kind])
