"""Signs calls between nodes and checks them, in plain Python: the oracle of call_key.pyx.

signer.sign(call, announcement_of_the_target)
other.check(call, announcement_of_the_origin)     # True once
"""

from __future__ import annotations

import hashlib
import hmac
import time

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network.announcement import Announcement
from polybus.dialects.gsb.network.node_key import NodeKey

MAC_BYTES = 16


class CallSigner:
    """One run of a node."""

    def __init__(self, key: NodeKey, instance: int) -> None:
        self._key = key
        self._own = bytes.fromhex(key.node_id[2:])
        self._instance = instance
        self._counter = time.time_ns()
        self._taken: set[bytes] = set()

    def sign(self, call: pb.RelayCall, target: Announcement) -> None:
        """Set origin, target, counter and MAC of a call of this node."""
        call.origin, call.target = self._own, bytes.fromhex(target.node_id[2:])
        call.instance, call.target_instance = self._instance, target.instance
        self._counter += 1
        call.counter = self._counter
        call.mac = mac_of(call, self._key.shared_secret(target.exchange))

    def check(self, call: pb.RelayCall, origin: Announcement) -> bool:
        """Return whether the origin made this call for this node, and it was not taken before."""
        ends = bytes.fromhex(origin.node_id[2:]), origin.instance, self._own, self._instance
        if (call.origin, call.instance, call.target, call.target_instance) != ends:
            return False
        mac = mac_of(call, self._key.shared_secret(origin.exchange))
        is_new = mac not in self._taken
        self._taken.add(mac)
        return hmac.compare_digest(mac, call.mac) and is_new


def mac_of(call: pb.RelayCall, secret: bytes) -> bytes:
    address = call.address.encode()
    numbers = call.instance, call.target_instance, call.counter
    parts = (
        call.origin,
        call.target,
        *(number.to_bytes(8, "big") for number in numbers),
        len(address).to_bytes(2, "big"),
        address,
        call.data,
    )
    digest = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"polybus call")
    digest.update(b"".join(parts))
    return digest.digest()
