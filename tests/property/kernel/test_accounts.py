"""Accounts against their oracle: every charge and release, on values and on errors."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polybus.kernel.quota_account import MAX_AMOUNT, PLACES, QuotaAccount
from tests.rig.oracle import accounts as oracle

quotas = st.integers(-1, PLACES)
amounts = st.integers(-1, 12) | st.sampled_from((MAX_AMOUNT, MAX_AMOUNT - 1))
steps = st.lists(
    st.tuples(st.sampled_from(("charge", "release", "set_limit")), quotas, amounts), max_size=50
)


def outcome(account: Any, verb: str, *fields: int) -> Any:
    try:
        return getattr(account, verb)(*fields)
    except (ValueError, IndexError) as error:
        return type(error)


@given(steps)
def test_programs(program: list[tuple[str, int, int]]):
    kernel, plain = QuotaAccount("k"), oracle.QuotaAccount("k")
    assert kernel.key == plain.key
    for verb, quota, amount in program:
        assert outcome(kernel, verb, quota, amount) == outcome(plain, verb, quota, amount)
        assert kernel.is_empty == plain.is_empty
        for place in range(PLACES):
            assert kernel.held(place) == plain.held(place)
            assert kernel.limit(place) == plain.limit(place)
