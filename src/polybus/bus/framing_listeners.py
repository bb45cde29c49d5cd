"""The listeners of a dialect with several framings, which an option of the address chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.bus.dialect import DialectListener, DialectServer
    from polybus.model.address import Address


class FramingListeners:
    """A `DialectServer` of one server for each framing. The first is the usual framing."""

    def __init__(self, option: str, by_value: Mapping[str, DialectServer]) -> None:
        self._option = option
        self._by_value = by_value

    async def listen(self, address: Address) -> DialectListener:
        usual = next(iter(self._by_value))
        value = dict(address.options).get(self._option, usual)
        return await self._by_value[value].listen(address)

    async def reload(self) -> None:
        for server in self._by_value.values():
            await server.reload()

    def stop(self) -> None:
        for server in self._by_value.values():
            server.stop()

    async def close(self) -> None:
        for server in self._by_value.values():
            await server.close()
