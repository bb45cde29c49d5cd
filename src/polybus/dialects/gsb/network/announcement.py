"""The announcement of a node: its keys and its neighbours, signed by the node itself.

Nodes pass announcements on as they are. A node can therefore announce only itself, and an edge
between two nodes counts only if both announce it (topology.py). The newest announcement of a
node, by its sequence, replaces the others. A node that stops announces no neighbours.

`instance` is chosen at random at every start. Calls are signed for it, so calls of an earlier
run cannot be replayed, and two nodes with one key notice each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.gsb_packets import ID_BYTES
from polybus.dialects.gsb.network.node_key import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    NodeKey,
    node_id_of,
    verify,
)
from polybus.errors import MalformedRequest

MAX_NEIGHBOURS = 64
MAX_SEQUENCE = 2**63 - 1
PURPOSE = "announcement"


@dataclass(frozen=True)
class Announcement:
    """Neighbours are node ids, in ascending order."""

    public: bytes
    exchange: bytes
    instance: int
    sequence: int
    neighbours: tuple[str, ...]
    signature: bytes

    @classmethod
    def make(
        cls, key: NodeKey, instance: int, sequence: int, neighbours: tuple[str, ...]
    ) -> Announcement:
        fields = key.public, key.exchange_public, instance, sequence, neighbours
        return cls(*fields, key.sign(PURPOSE, *_signed_parts(*fields)))

    @classmethod
    def decode(cls, message: pb.Announcement) -> Announcement:
        """Check the form and the signature. Raises `MalformedRequest`."""
        if len(message.neighbours) > MAX_NEIGHBOURS:
            raise MalformedRequest("an announcement has an invalid form")
        neighbours = tuple(f"0x{one.hex()}" for one in message.neighbours)
        fields = (
            message.public_key,
            message.exchange_key,
            message.instance,
            message.sequence,
            neighbours,
        )
        has_form = (
            len(message.public_key) == len(message.exchange_key) == KEY_BYTES
            and len(message.signature) == SIGNATURE_BYTES
            and 0 < message.sequence <= MAX_SEQUENCE
            and all(len(one) == ID_BYTES for one in message.neighbours)
            and list(neighbours) == sorted(set(neighbours))
        )
        if not has_form:
            raise MalformedRequest("an announcement has an invalid form")
        if not verify(message.public_key, message.signature, PURPOSE, *_signed_parts(*fields)):
            raise MalformedRequest("an announcement has an invalid signature")
        return cls(*fields, message.signature)

    def encode(self) -> pb.Announcement:
        return pb.Announcement(
            public_key=self.public,
            exchange_key=self.exchange,
            instance=self.instance,
            sequence=self.sequence,
            neighbours=[bytes.fromhex(one[2:]) for one in self.neighbours],
            signature=self.signature,
        )

    def is_same_run(self, other: Announcement) -> bool:
        """Return whether calls to both announced nodes have the same key."""
        return (self.instance, self.exchange) == (other.instance, other.exchange)

    @cached_property
    def node_id(self) -> str:
        return node_id_of(self.public)


def _signed_parts(
    public: bytes, exchange: bytes, instance: int, sequence: int, neighbours: tuple[str, ...]
) -> tuple[bytes, ...]:
    numbers = instance.to_bytes(8, "big"), sequence.to_bytes(8, "big")
    return public, exchange, *numbers, ",".join(neighbours).encode()
