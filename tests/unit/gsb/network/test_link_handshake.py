"""The handshake of a link: both ends learn the other's id, and strangers fail."""

from __future__ import annotations

import pytest

from polybus.dialects.gsb.network.link_handshake import (
    BAD_HANDSHAKE,
    WRONG_NODE,
    LinkHandshake,
)
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.errors import BadFrame

A, B, STRANGER = NodeKey(b"a" * 32), NodeKey(b"b" * 32), NodeKey(b"s" * 32)
DIGEST = b"d" * 32


def ends(expected: str = "", digest: bytes = DIGEST) -> tuple[LinkHandshake, LinkHandshake]:
    return LinkHandshake(A, 1, digest, expected), LinkHandshake(B, 2, DIGEST)


def test_both_ends_learn_the_id_and_the_instance_of_the_other():
    dialler, acceptor = ends(expected=B.node_id)
    acceptor.on_proof(dialler.on_accept(acceptor.on_hello(dialler.hello())))
    assert (dialler.node_id, dialler.instance) == (B.node_id, 2)
    assert (acceptor.node_id, acceptor.instance) == (A.node_id, 1)


def test_the_dialler_refuses_another_node_than_the_expected_one():
    dialler, acceptor = ends(expected=STRANGER.node_id)
    with pytest.raises(BadFrame, match=WRONG_NODE):
        dialler.on_accept(acceptor.on_hello(dialler.hello()))


def test_a_stranger_between_the_ends_is_noticed_by_its_certificate():
    dialler, acceptor = ends(digest=b"x" * 32)
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        dialler.on_accept(acceptor.on_hello(dialler.hello()))


def test_signatures_are_not_accepted_from_another_handshake_or_role():
    dialler, acceptor = ends()
    accept = acceptor.on_hello(dialler.hello())
    proof = dialler.on_accept(accept)
    _, other = ends()
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        other.on_proof(proof)  # before any hello
    other.on_hello(LinkHandshake(A, 1, DIGEST).hello())
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        other.on_proof(proof)  # of another handshake
    proof.signature = accept.signature
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        acceptor.on_proof(proof)  # its own one, reflected


def test_a_handshake_begins_once():
    dialler, acceptor = ends()
    accept = acceptor.on_hello(dialler.hello())
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        acceptor.on_hello(LinkHandshake(STRANGER, 3, DIGEST).hello())
    acceptor.on_proof(dialler.on_accept(accept))
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        dialler.on_accept(accept)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("public_key", b""), ("nonce", b"short"), ("public_key", b"k" * 33)],
)
def test_a_hello_of_another_form_is_refused(field, value):
    dialler, acceptor = ends()
    hello = dialler.hello()
    setattr(hello, field, value)
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        acceptor.on_hello(hello)


@pytest.mark.parametrize("field", ["public_key", "nonce", "instance", "signature"])
def test_a_changed_accept_is_refused(field):
    dialler, acceptor = ends()
    accept = acceptor.on_hello(dialler.hello())
    changed = 9 if field == "instance" else STRANGER.sign("x")[: len(getattr(accept, field))]
    setattr(accept, field, changed)
    with pytest.raises(BadFrame, match=BAD_HANDSHAKE):
        dialler.on_accept(accept)
