"""Certificates: the right one is shown, and a reload changes it for newcomers only."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from polybus.errors import ConfigError
from polybus.server.certificates import Certificates
from polybus.server.settings import TlsSettings
from tests.rig.certificates import write_certificate


def shown(context: ssl.SSLContext, name: str | None = "localhost") -> bytes | None:
    """The certificate that a client is shown, over a connection in memory."""
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname=name)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return client.getpeercert(binary_form=True)


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@pytest.fixture
def files(tmp_path: Path) -> TlsSettings:
    certificate, key = write_certificate(tmp_path)
    return TlsSettings(certificate, key)


@pytest.mark.parametrize("name", ["localhost", None])
def test_reloaded_certificate_is_used_with_and_without_sni(files, tmp_path, name):
    certificates = Certificates(files)
    first = der(tmp_path / "cert.pem")
    assert shown(certificates.context, name) == first
    write_certificate(tmp_path)
    assert shown(certificates.context, name) == first
    certificates.reload()
    assert shown(certificates.context, name) == der(tmp_path / "cert.pem") != first


def test_invalid_certificate_reload_changes_nothing(files, tmp_path):
    certificates = Certificates(files)
    first = der(tmp_path / "cert.pem")
    (tmp_path / "other").mkdir()
    _, other_key = write_certificate(tmp_path / "other")
    (tmp_path / "key.pem").write_bytes(other_key.read_bytes())
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        certificates.reload()
    assert shown(certificates.context) == first


def test_invalid_certificate_files_are_named(files, tmp_path):
    (tmp_path / "cert.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"\[tls\] .*cert\.pem"):
        Certificates(files)
    (tmp_path / "cert.pem").unlink()
    with pytest.raises(ConfigError, match=r"cert\.pem: No such file"):
        Certificates(files)
    write_certificate(tmp_path)
    (tmp_path / "key.pem").unlink()
    with pytest.raises(ConfigError, match=r"key\.pem: No such file"):
        Certificates(files)


def test_encrypted_key_is_an_error_and_does_not_prompt(files, tmp_path):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match=r"\[tls\]"):
        Certificates(files)


def test_tls_below_1_2_is_refused(files):
    assert Certificates(files).context.minimum_version == ssl.TLSVersion.TLSv1_2
