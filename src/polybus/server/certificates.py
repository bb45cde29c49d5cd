"""The certificate of the encrypted listeners.

Listeners keep one `SSLContext` for the life of the bus. Its SNI callback passes each new
connection to the current context. So a reload (SIGHUP) builds a new context and swaps one
reference: a certificate that does not fit its key changes nothing, and open connections keep
their certificate.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import ssl
from pathlib import Path

from polybus.errors import ConfigError
from polybus.server.settings import TlsSettings
from polybus.transports.tls_connection import CertificateContext

CERTIFICATE = re.compile(
    rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END "
)


def digest_of(pem: bytes) -> bytes:
    """Return the SHA-256 of the first certificate of a PEM file; empty if none is found."""
    found = CERTIFICATE.search(pem)
    try:
        der = base64.b64decode(found[1]) if found else b""
    except ValueError:
        der = b""
    return hashlib.sha256(der).digest() if der else b""


def own_context(certificate: bytes, key: bytes) -> ssl.SSLContext:
    """Return the context of a certificate that is not in a file."""
    context = _new_context()
    # `ssl` reads certificates only from files; this one exists only in memory.
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, certificate + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    context.certificate_digest = digest_of(certificate)
    return context


def _new_context() -> CertificateContext:
    context = CertificateContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # older ones are broken
    return context


class Certificates:
    """The live context; `reload` reads the files again."""

    def __init__(self, settings: TlsSettings) -> None:
        if settings.certificate is None or settings.key is None:
            raise ConfigError("an encrypted listener needs certificate and key in [tls]")
        self._certificate: Path = settings.certificate
        self._key: Path = settings.key
        self._current = self._load()
        self.context = self._load()
        self.context.sni_callback = self._use_current

    def reload(self) -> None:
        """Read the files again. Raises `ConfigError` and changes nothing if one is invalid.

        May be called from any thread.
        """
        self._current = self._load()

    def _use_current(
        self, connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = _new_context()
        try:
            # An empty password: a key that has one would stop the bus to ask for it.
            context.load_cert_chain(self._certificate, self._key, password="")
            context.certificate_digest = digest_of(self._certificate.read_bytes())
        except ssl.SSLError as error:
            reason = error.reason or "not a certificate with its key in PEM form"
            raise ConfigError(f"[tls] {self._certificate} and {self._key}: {reason}") from None
        except OSError as error:
            # The error does not name the file.
            unreadable = self._key
            try:
                self._certificate.open("rb").close()
            except OSError:
                unreadable = self._certificate
            raise ConfigError(f"[tls] {unreadable}: {error.strerror}") from None
        return context
