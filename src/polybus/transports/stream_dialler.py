"""Connections that the bus opens to other machines, of the same kind as those it accepts."""

from __future__ import annotations

import asyncio
import socket
import ssl

from polybus.model.address import Address
from polybus.transports.stream_connection import StreamConnection
from polybus.transports.stream_listener import StreamEndpoint

CONNECT_TIMEOUT_S = 10.0


class StreamDialler(StreamEndpoint):
    """Dials. The sessions of its connections check the peer: no certificate is trusted."""

    async def wait_ended(self) -> None:
        """Wait until all connections have ended."""
        await self._empty.wait()

    async def dial(self, address: Address) -> StreamConnection:
        """Connect. Raises OSError. The session exists after the TLS handshake, or never."""
        tls = None
        if address.is_encrypted:
            # The session checks the peer, by the digest of its certificate.
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
            tls.minimum_version = ssl.TLSVersion.TLSv1_3
        connection = self._connection_maker(tls)()
        sock = await self._connect(address)
        if not connection.identify_and_admit(sock):
            sock.close()
            raise OSError("the limit of connections is reached")
        try:
            if self._options.pump is not None and tls is None:
                self._options.pump.add(sock, connection)
            else:
                await self._loop.create_connection(lambda: connection, sock=sock)
        except BaseException:
            sock.close()
            connection.discard()
            raise
        return connection

    async def _connect(self, address: Address) -> socket.socket:
        resolved = await self._loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, endpoint = resolved[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._loop.sock_connect(sock, endpoint)
        except BaseException:
            sock.close()
            raise
        return sock
