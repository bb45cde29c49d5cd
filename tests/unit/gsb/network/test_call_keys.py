"""Signed calls: only their origin can make them, only their target takes them, and once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network import call_keys
from polybus.dialects.gsb.network.announcement import Announcement
from polybus.dialects.gsb.network.call_key import WINDOW, CallKey
from polybus.dialects.gsb.network.call_keys import CallKeys
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.model.access_rule import Rule
from tests.rig.gsb_call_signer import CallSigner
from tests.rig.gsb_link_peer import INSTANCE, MemoryLink
from tests.rig.gsb_memory_peer import MemoryPeer
from tests.rig.gsb_wire import read_failure
from tests.rig.memory_bus import MemoryBus

A, HOP = NodeKey(b"a" * 32), NodeKey(b"h" * 32)
TAKEN, UNKNOWN_RUN, FORGED = 0, 503, 403


class Target:
    """A bus with a service, and a link to the node A."""

    def __init__(self) -> None:
        self.bus = MemoryBus(policy=Policy())
        allow = Rule.parse("allow node:* call public/*")
        self.bus.broker.policy.replace([PlacedRule(allow, "config", None)])
        self.service = MemoryPeer(self.bus)
        self.service.register("public/greeter")
        self.link = MemoryLink(self.bus, A)

    def signed(self) -> pb.RelayCall:
        return self.link.call("public/greeter", data=b"data")

    def take(self, call: pb.RelayCall) -> int:
        """Send a call. Returns `TAKEN`, or the code with which the bus refuses it."""
        self.link.send_call(call)
        requests = self.service.packets()
        for request in requests:
            self.service.reply(request.call_request.request_id)
        (packet,) = self.link.packets()
        assert bool(requests) == (packet.call_reply.code == 0)
        return read_failure(packet.call_reply.data).code if packet.call_reply.code else TAKEN

    def restart_origin(self, instance: int) -> None:
        """Announce another run of A. Its calls are signed for it from now on."""
        self.link.instance = instance
        self.link.signer = CallSigner(A, instance)
        self.link.peer.send(announce=self.link.announce_packet())


@pytest.fixture
def target() -> Target:
    return Target()


def test_a_call_is_taken_once(target):
    call = target.signed()
    assert target.take(call) == TAKEN
    assert target.take(call) == FORGED
    assert target.take(target.signed()) == TAKEN


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("address", "public/greeter/other", FORGED),
        ("data", b"other", FORGED),
        ("counter", 7, FORGED),
        ("instance", 9, UNKNOWN_RUN),
        ("target_instance", 9, UNKNOWN_RUN),
        ("origin", b"o" * 20, UNKNOWN_RUN),
        ("mac", b"", FORGED),
        ("mac", bytes(16), FORGED),
    ],
)
def test_a_changed_call_is_refused(target, field, value, code):
    call = target.signed()
    setattr(call, field, value)
    assert target.take(call) == code


def test_hops_and_ids_of_a_link_are_not_signed(target):
    call = target.signed()
    call.hops, call.request_id, call.deadline_ms = 5, "other", 10
    assert target.take(call) == TAKEN


def test_a_hop_cannot_make_a_call_of_another_node(target):
    forged = target.signed()
    CallSigner(HOP, INSTANCE).sign(forged, target.link.heard[target.link.bus_id])
    forged.origin = bytes.fromhex(A.node_id[2:])
    assert target.take(forged) == FORGED


def test_calls_of_an_earlier_run_are_refused_and_those_of_the_new_one_taken(target):
    old = target.signed()
    target.restart_origin(INSTANCE + 1)
    assert target.take(old) == UNKNOWN_RUN
    assert target.take(target.signed()) == TAKEN


def test_a_call_of_an_earlier_run_is_not_taken_again_when_that_run_is_announced_again(target):
    call = target.signed()
    assert target.take(call) == TAKEN
    target.restart_origin(INSTANCE + 1)
    assert target.take(target.signed()) == TAKEN
    target.restart_origin(INSTANCE)
    assert target.take(call) == FORGED


def test_a_call_for_an_earlier_run_of_its_target_is_refused(target):
    now = target.link.heard[target.link.bus_id]
    earlier = Announcement.make(NodeKey(bytes(32)), now.instance - 1, 1, ())
    call = target.signed()
    target.link.signer.sign(call, earlier)
    assert target.take(call) == UNKNOWN_RUN
    call.target_instance = now.instance
    assert target.take(call) == FORGED  # the MAC covers it


def test_keys_are_bounded_and_the_last_used_ones_stay(monkeypatch):
    monkeypatch.setattr(call_keys, "MAX_KEYS", 2)
    keys = CallKeys(A, 1)
    key = keys.key_for(Announcement.make(HOP, 1, 1, ()))
    for instance in range(2, 9):
        keys.key_for(Announcement.make(HOP, instance, 1, ()))
        assert keys.key_for(Announcement.make(HOP, 1, 1, ())) is key, "counters in use were lost"
    assert keys.key_for(Announcement.make(HOP, 2, 1, ())).instance == 2


def new_key() -> CallKey:
    return CallKey(b"s" * 32, b"o" * 20, 1, b"n" * 20, 1)


def test_a_counter_far_behind_costs_no_memory():
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
