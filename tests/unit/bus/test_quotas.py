"""Quotas: exact to the byte, per account, and logged when reached."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.counters import Counters
from polybus.bus.quotas import BYTES, CONNECTIONS, QUOTAS, SUBSCRIPTIONS, TOPICS, Quotas
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.limits import MIB, QuotaLimits
from tests.rig.memory_bus import RecordedLog

ALICE, BOB, KEYED = Identity(1), Identity(2), Identity(1, key="k")
SMALL = QuotaLimits(quota_bytes=10, quota_subscriptions=2, quota_topics=1, quota_connections=3)


class Bench:
    def __init__(self, limits: QuotaLimits = SMALL) -> None:
        self.counters = Counters()
        self.log = RecordedLog()
        self.quotas = Quotas(limits, self.counters, self.log)


def test_the_defaults():
    quotas = Bench(QuotaLimits()).quotas
    limits = [quotas.limit(None, quota) for quota in QUOTAS]
    assert limits == [256 * MIB, 4096, 4096, 1024]


def test_charge_fits_completely_or_is_refused():
    quotas = Bench().quotas
    assert quotas.charge(ALICE, BYTES, 9)
    assert not quotas.charge(ALICE, BYTES, 2)
    assert quotas.used(1, BYTES) == 9
    assert quotas.charge(ALICE, BYTES, 1)
    assert not quotas.charge(ALICE, BYTES, 1)
    assert quotas.charge(ALICE, BYTES, 0)
    quotas.release(ALICE, BYTES, 10)
    assert quotas.charge(ALICE, BYTES, 10)


def test_accounts_and_quotas_are_independent():
    quotas = Bench().quotas
    assert quotas.charge(ALICE, TOPICS)
    assert not quotas.charge(ALICE, TOPICS)
    assert quotas.charge(BOB, TOPICS)
    assert quotas.charge(ALICE, SUBSCRIPTIONS, 2)
    assert quotas.charge(KEYED, TOPICS)  # a caller with a key has an account of its own


def test_anonymous_callers_share_one_account():
    quotas = Bench().quotas
    assert quotas.charge(ANONYMOUS, TOPICS)
    assert not quotas.charge(Identity(), TOPICS)
    assert quotas.charge(Identity(0), TOPICS)  # and root is not one of them


def test_overrides_are_per_user_and_per_quota():
    quotas = Bench().quotas
    quotas.configure(SMALL, {1: {TOPICS: 5}, 2: {CONNECTIONS: 0}})
    assert quotas.charge(ALICE, TOPICS, 5)
    assert not quotas.charge(ALICE, BYTES, 11)
    assert not quotas.charge(BOB, CONNECTIONS)
    assert quotas.limit(3, TOPICS) == 1
    assert quotas.limit("k", TOPICS) == 1


def test_lowered_quota_keeps_charges_and_refuses_new_ones():
    quotas = Bench().quotas
    assert quotas.charge(ALICE, BYTES, 10)
    quotas.configure(QuotaLimits(quota_bytes=5), {})
    assert not quotas.charge(ALICE, BYTES, 1)
    quotas.release(ALICE, BYTES, 6)
    assert quotas.charge(ALICE, BYTES, 1)
    assert not quotas.charge(ALICE, BYTES, 1)


def test_refused_charge_is_logged_with_user_and_quota():
    bench = Bench()
    bench.quotas.describe = lambda identity: f"alice({identity.uid})"
    bench.quotas.charge(ALICE, BYTES, 8)
    bench.quotas.charge(ALICE, BYTES, 3)
    fields = {"quota": "quota_bytes", "user": "alice(1)", "used": 8, "asked": 3, "limit": 10}
    assert bench.log.events == [("quota reached", {"level": "warning", **fields})]
    assert bench.counters.family("refused") == {"quota_bytes": 1}


def test_refused_trial_charge_is_not_logged():
    bench = Bench()
    assert bench.quotas.charge(ALICE, BYTES, 8, trial=True)
    assert bench.quotas.room(ALICE, BYTES) == 2
    assert not bench.quotas.charge(ALICE, BYTES, 3, trial=True)
    assert bench.quotas.used(1, BYTES) == 8
    assert bench.log.events == []
    assert bench.counters.family("refused") == {}


def test_account_without_charges_is_dropped():
    quotas = Bench().quotas
    assert quotas.charge(ALICE, BYTES, 2)
    assert quotas._accounts
    quotas.release(ALICE, BYTES, 2)
    assert not quotas._accounts


@pytest.mark.parametrize("amount", [1, 11])
def test_releasing_more_than_charged_raises(amount: int):
    quotas = Bench().quotas
    with pytest.raises(ValueError, match="released amount must be at most"):
        quotas.release(ALICE, BYTES, amount)
    with pytest.raises(ValueError, match="amount must be >= 0"):
        quotas.charge(ALICE, BYTES, -amount)
    with pytest.raises(ValueError, match="amount must be >= 0"):
        quotas.release(ALICE, BYTES, -amount)
    assert quotas.accounts() == []


STEPS = st.tuples(
    st.sampled_from([ALICE, BOB, KEYED, ANONYMOUS]),
    st.sampled_from(QUOTAS),
    st.integers(0, 6),
    st.booleans(),
)


@given(st.lists(STEPS, max_size=60), st.randoms(use_true_random=False))
def test_random_charges_and_releases_end_at_zero(steps, random):
    """A plain sum beside it agrees at every step; nothing is ever negative or over."""
    bench = Bench()
    held: list[tuple[Identity, str, int]] = []
    for identity, quota, amount, release in steps:
        if release and held:
            bench.quotas.release(*held.pop(random.randrange(len(held))))
            continue
        sums = Counter({(who.account, what): 0 for who, what, _ in held})
        for who, what, n in held:
            sums[who.account, what] += n
        fits = sums[identity.account, quota] + amount <= getattr(SMALL, quota)
        assert bench.quotas.charge(identity, quota, amount) is fits
        if fits:
            held.append((identity, quota, amount))
    for one in bench.quotas.accounts():
        assert 0 < one["used"] <= one["limit"]
    for charge in held:
        bench.quotas.release(*charge)
    assert bench.quotas.accounts() == []
