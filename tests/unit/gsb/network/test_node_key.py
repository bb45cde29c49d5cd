"""The key of a node: made once, kept, and the source of ids, signatures and secrets."""

from __future__ import annotations

import hashlib
import ssl

import pytest

from polybus.dialects.gsb.network.node_key import FILE, NodeKey, node_id_of, verify
from polybus.errors import Damaged
from polybus.model.identity import is_node_id


def test_the_key_is_made_once_and_readable_by_its_owner_alone(tmp_path):
    first, again = NodeKey.load(tmp_path), NodeKey.load(tmp_path)
    assert first.node_id == again.node_id
    assert is_node_id(first.node_id)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_the_id_is_a_hash_of_the_public_key():
    key = NodeKey.generate()
    assert key.node_id == "0x" + hashlib.sha256(key.public).hexdigest()[:40]
    assert key.node_id == node_id_of(key.public)
    assert key.node_id == NodeKey(bytes(32)).node_id or key.public != NodeKey(bytes(32)).public


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_file_that_is_no_key_is_an_error_and_stays(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(Damaged, match="not the key of a node"):
        NodeKey.load(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


def test_a_signature_is_for_one_key_one_purpose_and_its_parts():
    key, other = NodeKey.generate(), NodeKey.generate()
    signature = key.sign("purpose", b"ab", b"c")
    assert verify(key.public, signature, "purpose", b"ab", b"c")
    assert not verify(other.public, signature, "purpose", b"ab", b"c")
    assert not verify(key.public, signature, "other", b"ab", b"c")
    assert not verify(key.public, signature, "purpose", b"a", b"bc")
    assert not verify(key.public, signature[:-1], "purpose", b"ab", b"c")
    assert not verify(b"short", signature, "purpose", b"ab", b"c")


def test_two_nodes_share_a_secret_that_a_third_does_not_have():
    a, b, c = NodeKey.generate(), NodeKey.generate(), NodeKey.generate()
    assert a.shared_secret(b.exchange_public) == b.shared_secret(a.exchange_public)
    assert a.shared_secret(b.exchange_public) != c.shared_secret(b.exchange_public)


def test_a_key_that_gives_all_nodes_one_secret_is_refused():
    with pytest.raises(ValueError, match="Error computing shared key"):
        NodeKey.generate().shared_secret(bytes(32))  # of low order


def test_the_certificate_serves_tls(tmp_path):
    certificate, key = NodeKey.generate().certificate
    file = tmp_path / "pair.pem"
    file.write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
