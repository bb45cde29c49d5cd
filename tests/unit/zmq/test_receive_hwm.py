"""How many messages of a connection libzmq queues while none is read."""

from __future__ import annotations

import pytest
import zmq

from polybus.dialects.pirate.server import router_listener
from polybus.model.address import Address
from tests.rig.pirate.zmtp import RawPeer, message

MIB = 1 << 20
LARGE = message(bytes(8 * MIB))
STUCK_S = 0.5
# The kernel's buffers of a connection hold less than two large messages.
MOST, MANY = router_listener.RECEIVE_HWM + 2, router_listener.RECEIVE_HWM + 5


def taken_unread() -> int:
    """Return the number of large messages that one peer can send while none is read."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        router_listener.configure(router, Address.parse("tcp://127.0.0.1:0"))
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with RawPeer(port) as peer:
            peer._socket.settimeout(STUCK_S)
            for sent in range(MANY):
                try:
                    peer.send(LARGE)
                except TimeoutError:
                    return sent
        return MANY
    finally:
        router.close(0)
        context.term()


@pytest.mark.parametrize(("waiting", "most"), [(router_listener.RECEIVE_HWM, MOST), (0, MANY)])
def test_unread_complete_messages_per_peer_are_bounded(monkeypatch, waiting, most):
    """Without the bound all of them are taken."""
    monkeypatch.setattr(router_listener, "RECEIVE_HWM", waiting)
    assert waiting <= taken_unread() <= most
    assert waiting or taken_unread() == MANY
