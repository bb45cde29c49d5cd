"""A stream connection with TLS between the session and the socket.

The event loop's own TLS keeps encrypted bytes in a queue that is not visible: an outbox
could not tell a slow reader from a fast one, and a peer that never finishes its handshake
would not be counted by the gate. So the loop only moves bytes, and `ssl` works on two
buffers in memory:

    socket → _incoming → decrypt → receive buffer → session
    socket ←── transport ←── _outgoing ←── encrypt ←── session

The session exists only after the handshake. The listener is notified of a failed one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from polybus.transports.stream_connection import StreamConnection

if TYPE_CHECKING:
    from polybus.kernel.receive_buffer import SharedBuffer
    from polybus.transports.stream_session import StreamSession

HANDSHAKE_TIMEOUT_S = 10.0  # bounds how long an unfinished handshake holds a descriptor


class TlsConnection(StreamConnection):
    """`sealed` is the buffer of encrypted bytes, shared by all connections."""

    def __init__(
        self,
        open_session: Callable[[StreamConnection], StreamSession],
        shared: SharedBuffer,
        admit: Callable[[StreamConnection], bool],
        lost: Callable[[StreamConnection], None],
        context: ssl.SSLContext,
        sealed: SharedBuffer,
        failed: Callable[[str, str], None],
    ) -> None:
        super().__init__(open_session, shared, admit, lost)
        self._encrypted = sealed
        self._failed = failed  # called with peer and reason of a failed handshake
        self._begun = False  # the peer has sent bytes
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._timer: asyncio.TimerHandle | None = None
        self.get_buffer = self._sealed_space  # type: ignore[method-assign]
        self.buffer_updated = self._sealed_filled  # type: ignore[method-assign]

    # --- called by the session

    def write(self, data: bytes) -> None:
        if self._closing:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError:
            self.abort()
        self._send()

    def write_many(self, chunks: list[bytes]) -> None:
        self.write(b"".join(chunks))

    def close(self) -> None:
        if self._opened and not self._closing:
            self._send_close_notify()
        super().close()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._identify_and_admit(transport):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self._on_handshake_timeout)

    def _sealed_filled(self, nbytes: int) -> None:
        if not self._admitted or self._closing:
            return
        self._begun = True
        self._incoming.write(self._encrypted.view[:nbytes])
        try:
            if not self._opened:
                self._do_handshake()
            self._decrypt()
        except ssl.SSLWantReadError:
            self._send()
        except ssl.SSLError as error:
            self._send()  # the TLS alert with the reason
            if not self._opened:
                self._failed(self.peer, (error.reason or "unknown").lower())
            super().close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._begun and not self._opened and not self._closing:
            self._failed(self.peer, "hung_up")
        super().connection_lost(exc)

    def _on_handshake_timeout(self) -> None:
        self._failed(self.peer, "timeout")
        self.abort()

    def _do_handshake(self) -> None:
        self._tls.do_handshake()
        self._stop_timer()
        self._send()
        self._open()

    def _decrypt(self) -> None:
        """Decrypt and deliver received bytes until none are left or the session pauses."""
        while not self._paused and not self._closing:
            space = self._inbox.get_buffer()
            count = cast(
                int, self._tls.read(len(space), space)
            )  # with a buffer it returns the count
            if not count:
                self._on_close_notify()
                return
            self._inbox.buffer_updated(count)

    def _offer_again(self) -> None:
        super()._offer_again()
        try:
            self._decrypt()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self.abort()

    def _read_rest(self) -> None:
        """Discard the undecrypted rest: TLS cannot proceed without the peer."""

    def _sealed_space(self, sizehint: int) -> memoryview:
        return self._encrypted.view

    def _send(self) -> None:
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def _on_close_notify(self) -> None:
        if not self.eof_received():
            self.close()

    def _send_close_notify(self) -> None:
        """Send close_notify, so that the peer can tell the end from a cut. Await no reply."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass
        self._send()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
