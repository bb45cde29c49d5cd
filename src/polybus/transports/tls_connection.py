"""A stream connection with TLS between the session and the socket.

The event loop's own TLS keeps encrypted bytes in a queue that is not visible: an outbox
could not tell a slow reader from a fast one, and a peer that never finishes its handshake
would not be counted by the connection limit. So the loop only moves bytes, and `ssl` works on two
buffers in memory:

    socket → _incoming → decrypt → receive buffer → session
    socket ←── transport ←── _outgoing ←── encrypt ←── session

The session exists only after the handshake. The listener is notified of a failed one.

With a client's context the connection is the one that dials.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from polybus.kernel.receive_buffer import SharedBuffer
from polybus.transports.stream_connection import OPEN_STATES, Event, State, StreamConnection

if TYPE_CHECKING:
    from polybus.transports.hangup_monitor import HangupMonitor
    from polybus.transports.stream_session import StreamSession

HANDSHAKE_TIMEOUT_S = 10.0  # bounds how long an unfinished handshake holds a descriptor
# States in which the session accepts decrypted bytes.
DELIVERING = frozenset({State.READING, State.REDELIVERING})


class CertificateContext(ssl.SSLContext):
    """The context of a listener, with the SHA-256 of its certificate."""

    certificate_digest = b""


class TlsConnection(StreamConnection):
    """`sealed` is the buffer of encrypted bytes, shared by all connections."""

    def __init__(
        self,
        open_session: Callable[[StreamConnection], StreamSession],
        shared: SharedBuffer,
        admit: Callable[[StreamConnection], bool],
        lost: Callable[[StreamConnection], None],
        hangups: HangupMonitor | None,
        context: ssl.SSLContext,
        sealed: SharedBuffer,
        failed: Callable[[str, str], None],
    ) -> None:
        super().__init__(open_session, shared, admit, lost, hangups)
        self._encrypted = sealed
        self._failed = failed  # called with peer and reason of a failed handshake
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=self._is_server)
        self._handshake_timer: asyncio.TimerHandle | None = None

    # --- called by the session

    @property
    def certificate_digest(self) -> bytes:
        """The SHA-256 of the certificate of the end that was dialled."""
        if not self._is_server:
            return hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
        context = self._tls.context  # the current one, after a reload
        return context.certificate_digest if isinstance(context, CertificateContext) else b""

    @property
    def certificate_name(self) -> str:
        """The first name in the client's certificate; empty if the client has shown none."""
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        names = [value for _, value in certificate.get("subjectAltName", ())]
        for part in certificate.get("subject", ()):
            names += [value for kind, value in part if kind == "commonName"]
        return str(names[0]) if names else ""

    def _encrypt(self, data: bytes) -> None:
        if self._state not in OPEN_STATES:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError:
            self.abort()
        self._send()

    def write_many(self, chunks: list[bytes]) -> None:
        self._encrypt(b"".join(chunks))

    def close(self) -> None:
        if self._state in OPEN_STATES:
            # close_notify lets the peer tell the end from a cut. Its own is not awaited:
            # without it `unwrap` raises.
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass
            self._send()
        super().close()

    def redeliver_held(self) -> None:
        super().redeliver_held()
        # Bytes that arrived with the held ones may still be encrypted.
        try:
            self._decrypt()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._attach(transport)
        self.write = self._encrypt
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self._on_handshake_timeout)
        if not self._is_server:
            self._apply(Event.BEGIN_HANDSHAKE)
            self._shake_hands()

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        return self._encrypted.view

    def buffer_updated(self, nbytes: int) -> None:
        self._apply(Event.BEGIN_HANDSHAKE)
        if self._state is not State.HANDSHAKE and self._state not in OPEN_STATES:
            return
        self._incoming.write(self._encrypted.view[:nbytes])
        self._shake_hands()

    def _shake_hands(self) -> None:
        """Continue the handshake, if it is not done, and deliver decrypted bytes."""
        try:
            if self._state is State.HANDSHAKE:
                self._tls.do_handshake()
                self._stop_handshake_timer()
                self._send()
                self._open()
            self._decrypt()
        except ssl.SSLWantReadError:
            self._send()
        except ssl.SSLError as error:
            self._send()  # the TLS alert with the reason
            if self._state is State.HANDSHAKE:
                self._failed(self.peer, (error.reason or "unknown").lower())
            # Not self.close(): after a TLS error there is no close_notify to send.
            super().close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_handshake_timer()
        # A peer that sent nothing, such as a port scanner, is not a failed handshake.
        if self._state is State.HANDSHAKE:
            self._failed(self.peer, "hung_up")
        super().connection_lost(exc)

    def _on_handshake_timeout(self) -> None:
        self._failed(self.peer, "timeout")
        self.abort()

    def _stop_handshake_timer(self) -> None:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()

    def _decrypt(self) -> None:
        """Decrypt and deliver received bytes until none are left or the session pauses."""
        while self._state in DELIVERING:
            space = super().get_buffer()
            # With a buffer, `read` returns the count.
            count = cast(int, self._tls.read(len(space), space))
            if count:
                super().buffer_updated(count)
                continue
            # The peer's close_notify.
            if not self.eof_received():
                self.close()
            return

    def _read_rest(self) -> None:
        """Discard the undecrypted rest: TLS cannot proceed without the peer."""

    def _send(self) -> None:
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())
