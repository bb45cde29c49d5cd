"""Errors as Flight statuses."""

from __future__ import annotations

import json

import pytest

from polybus.errors import MalformedRequest
from polybus.transports.flight.flight_status import MAX_TEXT_BYTES, to_flight_status


@pytest.mark.parametrize("letter", ["x", "é", "\N{GRINNING FACE}"])
def test_long_text_is_truncated(letter):
    _, text, extra = to_flight_status(MalformedRequest(letter * MAX_TEXT_BYTES * 2))
    assert text == letter * (MAX_TEXT_BYTES // len(letter.encode())) + "…"
    assert json.loads(extra) == {"code": "malformed_request", "text": text}


def test_lone_surrogate_is_encoded():
    assert to_flight_status(MalformedRequest("not \ud800"))[1] == "not ?"


def test_short_text_is_unchanged():
    assert to_flight_status(MalformedRequest("x" * MAX_TEXT_BYTES))[1] == "x" * MAX_TEXT_BYTES
