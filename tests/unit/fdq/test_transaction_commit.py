"""The inline size of outputs is an upper bound of their JSON."""

import json

import pytest

from polybus.dialects.fdq.client.transaction import TransactionOutput, _inline_bytes, _to_json


@pytest.mark.parametrize("text", ["", "key", "é" * 100, "\x01" * 100, "\U0001f4a9" * 100])
@pytest.mark.parametrize("raw", [b"", b"x", b"xy", b"xyz" * 100])
@pytest.mark.parametrize("headers", [None, 0, 1, 40])
def test_inline_size_is_an_upper_bound(text, raw, headers):
    some = None if headers is None else [(f"{text}{n}", raw) for n in range(headers)]
    output = TransactionOutput(text, text or None, raw, some, 2**62)
    assert len(json.dumps([_to_json(output)])) <= _inline_bytes(output)


def test_inline_size_of_a_plain_output_is_small():
    assert _inline_bytes(TransactionOutput("orders", "customer-7", b"x" * 1000, None, 2**40)) < 2000
