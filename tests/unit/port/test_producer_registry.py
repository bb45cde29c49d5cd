"""Whose a producer is, on the reference engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from polybus.bus.shares import unshared_table
from polybus.errors import Denied, MalformedRequest, UnknownProducer
from polybus.model.identity import ANONYMOUS, Identity
from polybus.native.port.producer_registry import ProducerRegistry, owner_key
from polybus.store.engine_registry import open_store

ALICE, BOB, OPS = Identity(uid=4242), Identity(uid=4343), Identity(uid=4242, key="ops")


@pytest.fixture
def owners() -> Iterator[ProducerRegistry]:
    with open_store("memory:") as store:
        yield ProducerRegistry(
            store, time.monotonic, time.time_ns, unshared_table("max_producers", 1000)
        )


def test_first_opener_owns_the_producer(owners):
    with pytest.raises(UnknownProducer):
        owners.check(ALICE, "p")
    owners.claim(ALICE, "p")
    owners.claim(ALICE, "p")
    owners.check(ALICE, "p")
    for other in (BOB, OPS, ANONYMOUS):
        with pytest.raises(Denied):
            owners.claim(other, "p")
        with pytest.raises(Denied):
            owners.check(other, "p")


def test_cached_owner_is_dropped_with_the_producer(owners):
    owners.claim(ALICE, "p")
    owners.check(ALICE, "p")  # now cached
    owners.release("p")
    with pytest.raises(UnknownProducer):
        owners.check(ALICE, "p")
    owners.claim(BOB, "p")
    with pytest.raises(Denied):
        owners.check(ALICE, "p")


def test_of_two_claims_at_the_same_time_the_first_one_counts(owners, monkeypatch):
    """Bob claims the producer after Alice's claim has found no owner."""
    take = owners._shares.take

    def take_late(caller: Identity) -> None:
        if caller is ALICE:
            owners.claim(BOB, "p")
        take(caller)

    monkeypatch.setattr(owners._shares, "take", take_late)
    with pytest.raises(Denied, match="belongs to uid:4343"):
        owners.claim(ALICE, "p")
    owners.check(BOB, "p")


def test_second_lookup_returns_the_same_owner(owners):
    owners.claim(ALICE, "p")
    ProducerRegistry(
        owners._store, time.monotonic, time.time_ns, unshared_table("max_producers", 1000)
    ).check(ALICE, "p")


@pytest.mark.parametrize("name", ["", "p" * 256, "ä" * 128, "\ud800"])
def test_invalid_producer_name_is_refused(name):
    with pytest.raises(MalformedRequest):
        owner_key(name)
