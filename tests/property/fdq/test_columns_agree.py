"""Compiled and checked construction of batches agree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.fdq import MessageRequest
from polybus.dialects.fdq.client import message_columns
from polybus.dialects.fdq.client.request_columns import columns_of
from polybus.errors import PolybusError
from tests.rig.oracle import requests as oracle

LIMITS = 1024, 64 << 20
keys = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.sampled_from(["", "é" * 512, "k" * 1024, "k" * 1025, "é" * 513, "\ud800", "\0", "😀"]),
    st.just(b"bytes"),
)
bodies = st.one_of(st.binary(max_size=30), st.sampled_from(["text", bytearray(b"x"), None]))
headers = st.one_of(st.none(), st.none(), st.just({}), st.just({"a": b"b"}))
some = st.none() | st.text(max_size=5) | st.just("é" * 512)
data = st.binary(max_size=30)
plain = st.builds(MessageRequest, st.text(max_size=5), st.binary(max_size=30), st.none())
requests = st.one_of(
    plain,
    st.builds(MessageRequest, keys, bodies, headers),
    st.tuples(keys, bodies),
)


def outcome_of(make: Any, *args: Any, **settings: Any) -> Any:
    try:
        batch = make(*args, **settings)
        batch.validate(full=True)
        return batch.to_pylist(), batch.schema
    except PolybusError as error:
        return type(error)


@given(st.lists(requests, max_size=40))
def test_compiled_and_checked_batches_are_equal(batch: list[Any]) -> None:
    plain = outcome_of(message_columns.build_request_batch, batch, 17, with_headers=False)
    assert plain == outcome_of(message_columns._build_checked_batch, batch, 17, with_headers=False)


@given(st.lists(requests, max_size=20) | st.lists(st.builds(MessageRequest, some, data, st.none())))
def test_compiled_columns_agree_with_the_oracle(batch: list[Any]) -> None:
    expected = oracle.columns_of(batch, MessageRequest, *LIMITS)
    assert columns_of(batch, MessageRequest, *LIMITS) == expected


@given(st.lists(plain))
def test_plain_requests_use_compiled_columns(batch: list[MessageRequest]) -> None:
    found = columns_of(batch, MessageRequest, *LIMITS)
    assert found is not None
    validity, _, text, _, data = found
    assert validity is None
    assert text == "".join(one.shard_key or "" for one in batch).encode()
    assert data == b"".join(one.message for one in batch)


@pytest.mark.parametrize(
    "one",
    [
        ("k", b"x", None),
        MessageRequest("k", b"x", {}),
        MessageRequest("k" * 1025, b"x"),
        MessageRequest("é" * 513, b"x"),
        MessageRequest("\ud800", b"x"),
        MessageRequest("k", b"x" * 101),
        MessageRequest("k", bytearray(b"x")),  # type: ignore[arg-type]
        MessageRequest(b"k", b"x"),  # type: ignore[arg-type]
        MessageRequest._make(("k", b"x", 7)),
        tuple.__new__(MessageRequest, ("k", b"x")),
        tuple.__new__(MessageRequest, ()),
        None,
        7,
    ],
)
def test_other_requests_return_none(one: Any) -> None:
    assert columns_of([MessageRequest("k", b"x"), one], MessageRequest, 1024, 100) is None


def test_wrong_argument_types_are_refused() -> None:
    with pytest.raises(TypeError):
        columns_of((), MessageRequest, *LIMITS)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        columns_of([], int, *LIMITS)  # type: ignore[arg-type]
