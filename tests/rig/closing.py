"""Context managers that close themselves: a class needs only `close`."""

from __future__ import annotations

from typing import Self


class Closing:
    def close(self) -> object:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
