"""The listeners of Freud: each speaks one framing, which is an option of its address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.dialects.freud.limits import LENGTH, PAYLOAD, WITH_HEADER

if TYPE_CHECKING:
    from polybus.bus.dialect import DialectListener, DialectServer, ServeStreams
    from polybus.dialects.freud.server.session import FreudServer
    from polybus.model.address import Address


class FramingListeners:
    """A `DialectServer`. All listeners share the topics of one `FreudServer`."""

    def __init__(self, server: FreudServer, serve_streams: ServeStreams) -> None:
        self._by_length: dict[str, DialectServer] = {
            PAYLOAD: serve_streams(server, charge_user=True),
            WITH_HEADER: serve_streams(server.open_with_header, charge_user=True),
        }

    async def listen(self, address: Address) -> DialectListener:
        length = dict(address.options).get(LENGTH, PAYLOAD)
        return await self._by_length[length].listen(address)

    async def reload(self) -> None:
        for server in self._by_length.values():
            await server.reload()

    def stop(self) -> None:
        for server in self._by_length.values():
            server.stop()

    async def close(self) -> None:
        for server in self._by_length.values():
            await server.close()
