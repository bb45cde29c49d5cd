"""The deployed bus's own Rust client, as it was recorded: the bus answers it as it did then.

tests/vectors/ya_client.json has the frames of ya-service-bus with this bus, over TCP and over a
Unix socket. Here the client's frames are sent again, and the answers of the bus are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import pytest

from polybus.testing.bus_process import BusProcess, serve
from tests.rig import ya_wire
from tests.rig.observer import check_unharmed
from tests.rig.ya_partner import partner
from tests.rig.ya_peer import YaPeer, dial
from tests.rig.ya_wire import BROADCAST, CALL, HELLO, REPLY, Frames, Packet
from tests.vectors.ya_client import CONVERSATIONS, Conversation, Step


@pytest.fixture
def bus(conversation: Conversation, tmp_path: Path) -> Iterator[BusProcess]:
    is_unix = conversation.name.endswith("unix")
    ya = f"unix:{tmp_path}/ya.sock" if is_unix else "tcp://127.0.0.1:0"
    with serve(listen=["gsb=tcp://127.0.0.1:0", f"gsb+ya={ya}"]) as running:
        yield running
        check_unharmed(running)


def decode(frame: bytes) -> Packet:
    (packet,) = Frames().feed(frame)
    return packet


class Replay:
    """One connection. The bus's ids of its calls differ from the recorded ones."""

    def __init__(self, peer: YaPeer) -> None:
        self._peer = peer
        self._ids: dict[bytes, bytes] = {}  # recorded → of this run

    def send(self, frame: bytes) -> None:
        packet = decode(frame)
        assert ya_wire.frame(packet.kind, packet.fields) == frame
        if packet.kind == REPLY:
            fields = packet.fields | {1: self._ids[packet.data(1)]}
            frame = ya_wire.frame(REPLY, fields)
        self._peer.send(frame)

    def receive(self, frames: Sequence[bytes]) -> None:
        """Receive as many packets, and compare them; their order is that of the recording."""
        expected = [decode(frame) for frame in frames]
        received = [self._peer.packet() for _ in frames]
        for old, new in zip(expected, received, strict=True):
            if old.kind == new.kind == CALL:
                self._ids[old.data(3)] = new.data(3)
        assert list(map(comparable, received)) == list(map(comparable, expected))


def comparable(packet: Packet) -> Packet:
    """Return a packet without the values that differ from run to run."""
    fields = dict(packet.fields)
    if packet.kind == HELLO:
        assert (packet.text(1), len(packet.data(3))) == ("polybus", 16)
        fields[2] = fields[3] = b""
    elif packet.kind == CALL:
        fields[3] = b""
    if packet.kind in (CALL, BROADCAST):
        fields[1] = re.sub(rb"^local:\d+$", b"local:uid", packet.data(1))
    return Packet(packet.kind, fields)


def replay(conversation: Conversation, bus: BusProcess) -> None:
    with ExitStack() as stack:
        connections: dict[int, Replay] = {}

        def key(step: Step) -> tuple[int, bool]:
            return step.connection, step.is_of_client

        for (number, is_of_client), steps in groupby(conversation.steps, key):
            if number not in connections:
                peer = stack.enter_context(dial(bus.address("gsb+ya")))
                connections[number] = Replay(peer)
            frames = [step.frame for step in steps]
            if is_of_client:
                for frame in frames:
                    connections[number].send(frame)
            else:
                connections[number].receive(frames)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=str)
def test_the_bus_answers_as_it_answered_the_real_client(bus, conversation):
    with partner(str(bus.address("gsb"))) as pushed:
        replay(conversation, bus)
    if "raw" in conversation.name:
        assert pushed == [7]


def test_the_recordings_have_every_kind_of_packet():
    kinds = {decode(step.frame).kind for one in CONVERSATIONS for step in one.steps}
    assert kinds == set(range(HELLO, ya_wire.PING))
