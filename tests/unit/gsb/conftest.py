"""Tests of GSB sessions run with packets in their usual form, and in one for protobuf to decode."""

from __future__ import annotations

import pytest

from tests.rig.gsb_memory_peer import UNKNOWN_FIELD


@pytest.fixture(params=[b"", UNKNOWN_FIELD], ids=["usual", "unusual"])
def padding(request: pytest.FixtureRequest) -> bytes:
    """Return what the peers of the bus add to each packet."""
    added: bytes = request.param
    return added
