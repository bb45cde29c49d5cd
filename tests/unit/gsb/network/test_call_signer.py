"""Signed calls: only their origin can make them, only their target takes them, and once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network import call_signer
from polybus.dialects.gsb.network.announcement import Announcement
from polybus.dialects.gsb.network.call_key import WINDOW, CallKey
from polybus.dialects.gsb.network.call_signer import CallSigner
from polybus.dialects.gsb.network.node_key import NodeKey

A, B, HOP = NodeKey(b"a" * 32), NodeKey(b"b" * 32), NodeKey(b"h" * 32)


def announced(key: NodeKey, instance: int = 1) -> Announcement:
    return Announcement.make(key, instance, 1, ())


def signed(signer: CallSigner, data: bytes = b"data") -> pb.RelayCall:
    call = pb.RelayCall(request_id="1", address="public/greeter", data=data, hops=1)
    signer.sign(call, announced(B))
    return call


@pytest.fixture
def ends() -> tuple[CallSigner, CallSigner]:
    return CallSigner(A, 1), CallSigner(B, 1)


def test_a_call_is_taken_once(ends):
    origin, target = ends
    call = signed(origin)
    assert target.check(call, announced(A))
    assert not target.check(call, announced(A))
    assert target.check(signed(origin), announced(A))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", "public/other"),
        ("data", b"other"),
        ("counter", 7),
        ("instance", 9),
        ("target_instance", 9),
        ("target", b"t" * 20),
        ("origin", b"o" * 20),
        ("mac", b""),
        ("mac", bytes(16)),
    ],
)
def test_a_changed_call_is_refused(ends, field, value):
    origin, target = ends
    call = signed(origin)
    setattr(call, field, value)
    assert not target.check(call, announced(A))


def test_hops_and_ids_of_a_link_are_not_signed(ends):
    origin, target = ends
    call = signed(origin)
    call.hops, call.request_id, call.deadline_ms = 5, "other", 10
    assert target.check(call, announced(A))


def test_a_hop_cannot_make_a_call_of_another_node(ends):
    _, target = ends
    forged = signed(CallSigner(HOP, 1))
    forged.origin = bytes.fromhex(A.node_id[2:])
    assert not target.check(forged, announced(A))


def test_calls_of_an_earlier_run_are_refused_and_those_of_the_new_one_taken(ends):
    origin, target = ends
    old = signed(origin)
    assert not target.check(old, announced(A, instance=2))
    assert target.check(signed(CallSigner(A, 2)), announced(A, instance=2))


def test_a_call_of_an_earlier_run_is_not_taken_again_when_that_run_is_announced_again(ends):
    origin, target = ends
    call = signed(origin)
    assert target.check(call, announced(A))
    assert target.check(signed(CallSigner(A, 2)), announced(A, instance=2))
    assert not target.check(call, announced(A))


def test_keys_are_bounded_and_the_last_used_ones_stay(ends, monkeypatch):
    monkeypatch.setattr(call_signer, "MAX_KEYS", 2)
    origin, target = ends
    call = signed(origin)
    assert target.check(call, announced(A))
    for instance in range(2, 9):
        target.key_for(announced(HOP, instance))
        assert not target.check(call, announced(A)), "the counters of a key in use were lost"


def test_a_call_for_an_earlier_run_of_its_target_is_refused(ends):
    origin, _ = ends
    call = signed(origin)
    restarted = CallSigner(B, 2)
    assert not restarted.check(call, announced(A))
    call.target_instance = 2
    assert not restarted.check(call, announced(A))  # the MAC covers it


def new_key() -> CallKey:
    return CallKey(b"s" * 32, b"o" * 20, 1, b"n" * 20, 1)


def test_a_counter_far_behind_costs_no_memory(ends):
    """A window of the whole distance would have 2**60 bits."""
    window = new_key()
    assert window.accept(2**61)
    assert not window.accept(1)
    assert window.accept(2**63 - 1)


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=60))
def test_the_window_takes_each_counter_once_and_none_that_is_too_old(counters):
    window, taken, newest = new_key(), set(), 0
    for counter in counters:
        is_new = counter not in taken and counter > newest - WINDOW
        assert window.accept(counter) is is_new
        if is_new:
            taken.add(counter)
            newest = max(newest, counter)
