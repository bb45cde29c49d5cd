"""Errors keep their type, text and attributes when they are copied, pickled or transmitted."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import copy

import pytest

from polybus import errors
from polybus.errors import PolybusError, error_from_code

EXAMPLES = [
    errors.StoreFull("the disk is full"),
    errors.LimitReached("max_topics", "the bus has 3 topics"),
    errors.LimitReached("max_topics"),
    errors.Trimmed("offsets before 7 were trimmed", 7),
    errors.MissingExtra("Spark", "spark"),
    errors.BadFrame("bad_length"),
    errors.ServiceFailed("no such file", 404, {"path": "/x"}),
]


def unpickled(error: PolybusError) -> PolybusError:
    restored = pickle.loads(pickle.dumps(error))
    assert isinstance(restored, PolybusError)
    return restored


@pytest.mark.parametrize("duplicate", [copy, unpickled])
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_copy_has_type_text_and_attributes(
    error: PolybusError, duplicate: Callable[[PolybusError], PolybusError]
) -> None:
    again = duplicate(error)
    assert again is not error
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_received_error_has_type_text_and_the_same_attribute_names(error: PolybusError) -> None:
    received = error_from_code(error.code, str(error))
    assert (type(received), str(received)) == (type(error), str(error))
    assert vars(received).keys() == vars(error).keys()


def test_unknown_code_gives_the_root_of_the_tree() -> None:
    received = error_from_code("of_a_later_version", "text")
    assert (type(received), str(received)) == (PolybusError, "text")
