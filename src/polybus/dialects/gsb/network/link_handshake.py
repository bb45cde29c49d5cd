"""The handshake of a link: each end proves that it has the key of its node. No I/O.

    dialler                              acceptor
      │ LinkHello: key, nonce ──────────▶ │
      │ ◀────────── LinkAccept: key, nonce, signature
      │ LinkProof: signature ───────────▶ │

Both sign the nonces and keys of both ends and the digest of the acceptor's certificate, each for
a purpose of its own. The digest binds the link to its TLS connection: a stranger between the two
has another certificate. The certificate itself is not trusted, so none needs an authority.
"""

from __future__ import annotations

import hmac
import os

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.network.node_key import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    NodeKey,
    node_id_of,
    verify,
)
from polybus.errors import BadFrame

VERSION = 1
NONCE_BYTES = 32
ACCEPT, PROOF = "link accept", "link proof"

# Reasons for which a link is refused. They are names of counters.
BAD_HANDSHAKE = "bad_link_handshake"
WRONG_NODE = "wrong_node"


class LinkHandshake:
    """One end of the handshake. `node_id` and `instance` of the peer are set when it is proved."""

    def __init__(
        self, key: NodeKey, instance: int, certificate_digest: bytes, expected: str = ""
    ) -> None:
        """`expected` is the id that the peer must have, or empty."""
        self._key = key
        self._instance = instance
        self._digest = certificate_digest
        self._expected = expected
        self._nonce = os.urandom(NONCE_BYTES)
        self._transcript: tuple[bytes, ...] = ()
        self._peer_public = b""
        self.node_id = ""
        self.instance = 0

    # --- the dialler

    def hello(self) -> pb.LinkHello:
        return pb.LinkHello(
            version=VERSION,
            public_key=self._key.public,
            nonce=self._nonce,
            instance=self._instance,
        )

    def on_accept(self, accept: pb.LinkAccept) -> pb.LinkProof:
        """Check the acceptor and return the proof for it. Raises `BadFrame`."""
        self._check_peer(accept.public_key, accept.nonce)
        self._transcript = (
            *(self._nonce, accept.nonce, self._key.public, accept.public_key),
            *(self._instance.to_bytes(8, "big"), accept.instance.to_bytes(8, "big")),
            self._digest,
        )
        self._check_signature(accept.public_key, accept.signature, ACCEPT)
        self._set_peer(accept.public_key, accept.instance)
        return pb.LinkProof(signature=self._key.sign(PROOF, *self._transcript))

    # --- the acceptor

    def on_hello(self, hello: pb.LinkHello) -> pb.LinkAccept:
        """Check the dialler's hello and return the answer. Raises `BadFrame`."""
        if hello.version != VERSION:
            raise BadFrame(BAD_HANDSHAKE)
        self._check_peer(hello.public_key, hello.nonce)
        self._transcript = (
            *(hello.nonce, self._nonce, hello.public_key, self._key.public),
            *(hello.instance.to_bytes(8, "big"), self._instance.to_bytes(8, "big")),
            self._digest,
        )
        self._peer_public, self.instance = hello.public_key, hello.instance
        return pb.LinkAccept(
            public_key=self._key.public,
            nonce=self._nonce,
            instance=self._instance,
            signature=self._key.sign(ACCEPT, *self._transcript),
        )

    def on_proof(self, proof: pb.LinkProof) -> None:
        """Check the dialler's proof. Raises `BadFrame`."""
        if not self._peer_public:
            raise BadFrame(BAD_HANDSHAKE)
        self._check_signature(self._peer_public, proof.signature, PROOF)
        self._set_peer(self._peer_public, self.instance)

    # --- both

    def _check_peer(self, public: bytes, nonce: bytes) -> None:
        if self._transcript or len(public) != KEY_BYTES or len(nonce) != NONCE_BYTES:
            raise BadFrame(BAD_HANDSHAKE)

    def _check_signature(self, public: bytes, signature: bytes, purpose: str) -> None:
        if len(signature) != SIGNATURE_BYTES or not verify(
            public, signature, purpose, *self._transcript
        ):
            raise BadFrame(BAD_HANDSHAKE)

    def _set_peer(self, public: bytes, instance: int) -> None:
        self.node_id, self.instance = node_id_of(public), instance
        if self._expected and not hmac.compare_digest(self.node_id, self._expected):
            raise BadFrame(WRONG_NODE)
