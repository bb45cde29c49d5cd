"""Shares of a bounded table: exact, named, and released from the same account."""

from __future__ import annotations

import pytest

from polybus.bus.policy import Policy
from polybus.bus.shares import Shares, ShareTable
from polybus.errors import LimitReached
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.limits import Limits

ROOT, ALICE, BOB = Identity(uid=0), Identity(uid=1001), Identity(uid=1002)


def table(user_limit: str = "") -> ShareTable:
    return ShareTable("max_things", 8, 4, 1, Policy((0,)).is_admin, user_limit=user_limit)


def refused(shares: ShareTable, caller: Identity, amount: int = 1) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        shares.take(caller, amount)
    return caught.value


def test_share_is_exact_and_names_account_and_limit():
    shares = table()
    for _ in range(4):
        shares.take(ALICE)
    error = refused(shares, ALICE)
    assert error.limit == "max_things"
    assert str(error) == "uid:1001 has its share of max_things (4 of 8); retry later"
    assert (shares.used, shares.held("uid:1001")) == (4, 4)
    shares.take(BOB)
    shares.release("uid:1001")
    shares.take(ALICE)


def test_reserve_is_for_admins():
    shares = table()
    shares.take(ALICE, 4)
    shares.take(BOB, 3)
    assert "the last 1 of max_things (8) are for admins" in str(refused(shares, BOB))
    assert "are for admins" in str(refused(shares, ANONYMOUS))
    shares.take(ROOT)
    assert "max_things (8) is reached" in str(refused(shares, ROOT))


def test_admin_has_no_share():
    shares = table()
    shares.take(ROOT, 8)
    assert shares.used == 8


def test_freud_may_use_the_reserve_within_its_share():
    shares = table()
    shares.take(BOB, 4)
    shares.take(ALICE, 3)
    shares.take(ALICE, may_use_reserve=True)
    shares.release("uid:1002")
    with pytest.raises(LimitReached):
        shares.take(ALICE, may_use_reserve=True)


def test_setting_for_one_user_holds_for_admins():
    shares = table(user_limit="max_user_things")
    shares.take(ROOT, 4)
    assert refused(shares, ROOT).limit == "max_user_things"


def test_token_of_a_user_named_like_a_uid_is_another_account():
    shares = table()
    shares.take(Identity(key="uid:1001"), 4)
    shares.take(ALICE)
    assert shares.held("uid:1001") == 1


def test_refusals_are_counted_with_their_reason():
    reasons: list[str] = []
    shares = ShareTable("max_things", 4, 2, 1, lambda identity: False, reasons.append)
    refused(shares, ALICE, 3)
    shares.take(ALICE, 2)
    refused(shares, BOB, 2)
    refused(shares, BOB, 3)
    assert reasons == ["max_things_share", "max_things_reserve", "max_things"]


def test_releasing_more_than_was_taken_is_an_error():
    shares = table()
    shares.take(ALICE)
    with pytest.raises(ValueError, match="uid:1002 has fewer than 1 entries of max_things"):
        shares.release("uid:1002")
    assert shares.used == 1


def test_entries_of_a_store_are_never_refused():
    shares = table()
    shares.restore("uid:1001", 20)
    assert shares.used == 20
    refused(shares, ROOT)
    shares.release("uid:1001", 20)
    assert shares.used == 0


@pytest.mark.parametrize(
    ("total", "share", "reserve"),
    [(1, 1, 0), (2, 1, 1), (3, 1, 1), (16, 8, 1), (32, 16, 2), (1024, 512, 64)],
)
def test_shares_of_small_and_large_tables(total, share, reserve):
    made = Shares(Limits(), Policy((0,)).is_admin).new_table("max_things", total)
    assert (made.share, made.reserve) == (share, reserve)


def test_one_user_may_have_all():
    shares = Shares(Limits(user_share=1.0, admin_reserve=0.0), Policy((0,)).is_admin)
    made = shares.new_table("max_things", 5)
    made.take(ALICE, 5)
