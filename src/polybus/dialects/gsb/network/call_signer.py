"""Signs the calls of this node for other nodes, and checks the calls of others.

Origin and target of a call share a secret (node_key.py), so a node between them can neither make
nor change a call of another node. A MAC is a hundred times faster than a signature, and there is
one for each call.

The MAC covers origin, target, the instances of both, a counter, the address and the data. The
target remembers the newest counters of each origin and takes each of them once. A process that
starts has a new instance, and refuses calls for an earlier one.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from itertools import count
from typing import TYPE_CHECKING

from polybus.dialects.gsb import gsb_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polybus.dialects.gsb.network.announcement import Announcement
    from polybus.dialects.gsb.network.node_key import NodeKey

MAC_BYTES = 16
# Counters of one origin that may overtake each other: calls take different paths.
WINDOW = 4096
MAX_PEERS = 16_384  # some 1 KiB each; more than the nodes of half an hour, with `max_nodes` 1024


class ReplayWindow:
    """The counters of one origin that were seen: the newest, and those shortly before it."""

    __slots__ = ("_newest", "_seen")

    def __init__(self) -> None:
        self._newest = 0
        self._seen = 0  # bit n: newest - n was seen

    def accept(self, counter: int) -> bool:
        """Return whether the counter is new, and remember it."""
        if counter > self._newest:
            shift = counter - self._newest
            self._seen = (self._seen << shift | 1) & ((1 << WINDOW) - 1) if shift < WINDOW else 1
            self._newest = counter
            return True
        behind = self._newest - counter
        if behind >= WINDOW or self._seen & 1 << behind:
            return False
        self._seen |= 1 << behind
        return True


class _Peer:
    """The secret of this node and another one, and the calls between them."""

    __slots__ = ("counters", "exchange", "instance", "secret", "window")

    def __init__(self, announcement: Announcement, secret: bytes) -> None:
        self.exchange = announcement.exchange
        self.instance = announcement.instance
        self.secret = secret
        # Above those that were used for this node before its entry was dropped, if it was.
        self.counters: Iterator[int] = count(time.time_ns() >> 10)
        self.window = ReplayWindow()


class CallSigner:
    def __init__(self, key: NodeKey, instance: int) -> None:
        self._key = key
        self._own = bytes.fromhex(key.node_id[2:])
        self._instance = instance
        self._peers: dict[str, _Peer] = {}

    def sign(self, call: pb.RelayCall, target: Announcement) -> None:
        """Set origin, target, counter and MAC of a call of this node.

        Raises ValueError if the target has announced an invalid key.
        """
        peer = self._peer(target)
        call.origin, call.target = self._own, bytes.fromhex(target.node_id[2:])
        call.instance, call.target_instance = self._instance, target.instance
        call.counter = next(peer.counters)
        call.mac = _mac(peer.secret, call)

    def check(self, call: pb.RelayCall, origin: Announcement) -> bool:
        """Return whether the origin made this call, for this node, and not before."""
        try:
            peer = self._peer(origin)
        except ValueError:
            return False
        if call.instance != peer.instance or call.target_instance != self._instance:
            return False
        if not hmac.compare_digest(_mac(peer.secret, call), call.mac):
            return False
        return peer.window.accept(call.counter)

    def _peer(self, announcement: Announcement) -> _Peer:
        node = announcement.node_id
        peer = self._peers.get(node)
        if peer is None or peer.exchange != announcement.exchange:
            peer = _Peer(announcement, self._key.shared_secret(announcement.exchange))
            self._peers[node] = peer
            if len(self._peers) > MAX_PEERS:
                self._peers.pop(next(iter(self._peers)))
        elif peer.instance != announcement.instance:
            # The origin has restarted, and its counters with it.
            peer.instance, peer.window = announcement.instance, ReplayWindow()
        return peer


def _mac(secret: bytes, call: pb.RelayCall) -> bytes:
    digest = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"polybus call")
    address = call.address.encode()
    head = b"%b%b%b%b%b%b" % (
        call.origin,
        call.target,
        call.instance.to_bytes(8, "big"),
        call.target_instance.to_bytes(8, "big"),
        call.counter.to_bytes(8, "big"),
        len(address).to_bytes(2, "big"),
    )
    digest.update(head)
    digest.update(address)
    digest.update(call.data)
    return digest.digest()
