"""The life of an async client or subscription: `async with` opens it and closes it."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Self


class AsyncContext:
    """An object for `async with`. The default `_on_enter` is for objects that are made open."""

    async def __aenter__(self) -> Self:
        await self._on_enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._on_exit(error)

    async def _on_enter(self) -> None:
        """Open the object."""

    @abstractmethod
    async def _on_exit(self, error: BaseException | None) -> None:
        """Close the object. `error` is the exception that ends the block, or None."""


class AsyncClient(AsyncContext):
    """A client with `open` and `close`."""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def _on_enter(self) -> None:
        await self.open()

    async def _on_exit(self, error: BaseException | None) -> None:
        await self.close()
