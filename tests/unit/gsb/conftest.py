"""Tests of GSB sessions run with the fast path of calls and without it."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    """Whether calls between GSB connections take the compiled fast path."""
    is_enabled: bool = request.param
    return is_enabled
