"""The key of a node: made once, kept with the data, and the source of the node's id.

node id         0x and 40 hex digits: the first 20 bytes of SHA-256 of the public key
signatures      Ed25519, each over a purpose and length-prefixed parts
shared secrets  X25519, by a second key that is derived from the first; two nodes compute
                the same secret from their own key and the announced key of the other
certificate     self-signed, for listeners that have no other; peers do not trust it, they
                verify a signature over its digest (link_handshake.py)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from polybus.dialects.gsb.gsb_packets import ID_BYTES
from polybus.errors import Damaged

FILE = "gsb-node.pem"
KEY_BYTES = 32
SIGNATURE_BYTES = 64
SECRET_BYTES = 32
CERTIFICATE_DAYS = 36_500  # peers do not check it; each start makes a new one


def node_id_of(public: bytes) -> str:
    """Return the id of the node with this public key."""
    return "0x" + hashlib.sha256(public).digest()[:ID_BYTES].hex()


def verify(public: bytes, signature: bytes, purpose: str, *parts: bytes) -> bool:
    """Return whether the owner of `public` has signed these parts for this purpose."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public)
        key.verify(signature, _signed_bytes(purpose, parts))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(purpose: str, parts: tuple[bytes, ...]) -> bytes:
    """Return the bytes of a signature. Lengths keep parts from running into each other."""
    texts = [f"polybus gsb {purpose}".encode(), *parts]
    return b"".join(len(text).to_bytes(4, "big") + text for text in texts)


class NodeKey:
    """The private key of this node."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()
        self.node_id = node_id_of(self.public)
        exchange_seed = hashlib.sha256(b"polybus gsb exchange" + seed).digest()
        self._exchange = X25519PrivateKey.from_private_bytes(exchange_seed)
        self.exchange_public = self._exchange.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> NodeKey:
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load(cls, folder: Path) -> NodeKey:
        """Read the key from a data folder. Makes one if there is none. Raises `Damaged`."""
        path = folder / FILE
        with contextlib.suppress(FileNotFoundError):
            return cls._read(path)
        made = cls.generate()
        pem = made._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        # Linked under its name when it is complete: two processes must not get different keys.
        draft = folder / f"{FILE}.{os.getpid()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        return cls._read(path)

    @classmethod
    def _read(cls, path: Path) -> NodeKey:
        text = path.read_bytes()
        try:
            key = load_pem_private_key(text, None)
        except ValueError:
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise Damaged(f"{path}: not the key of a node; restore it, or remove it for a new id")
        return cls(key.private_bytes_raw())

    def sign(self, purpose: str, *parts: bytes) -> bytes:
        return self._key.sign(_signed_bytes(purpose, parts))

    def shared_secret(self, exchange_public: bytes) -> bytes:
        """Return the secret that this node shares with the node of the given key.

        Raises ValueError for a key that gives every node the same secret.
        """
        secret = self._exchange.exchange(X25519PublicKey.from_public_bytes(exchange_public))
        return hashlib.blake2b(secret, digest_size=SECRET_BYTES, person=b"polybus gsb").digest()

    @cached_property
    def certificate(self) -> tuple[bytes, bytes]:
        """A new self-signed certificate and its key, both PEM."""
        # Not the node's own key: some TLS libraries do not know Ed25519 certificates.
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.node_id)])
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=CERTIFICATE_DAYS))
        )
        certificate = builder.sign(key, hashes.SHA256())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), pem
