from collections.abc import Callable, Mapping
from typing import Any, final

from polybus.kernel.registry import Registry
from polybus.kernel.unread import Unread, Writer

@final
class Tally:
    received: int
    received_bytes: int
    delivered: int
    delivered_bytes: int

class Life:
    # Both hold what bus/incarnation.py says.
    readers: dict[bytes, Any]
    buffer: list[Any]
    def __init__(self, name: bytes, /) -> None: ...
    @property
    def name(self) -> bytes: ...
    @property
    def writer(self) -> Writer: ...

class Lives:
    current: Any
    marked: list[Any]
    def __init__(self, name: bytes, /) -> None: ...
    @property
    def name(self) -> bytes: ...

@final
class ShortPath:
    def __init__(
        self,
        topics: Mapping[bytes, Lives],
        readers: Mapping[bytes, Unread],
        registry: Registry,
        tally: Tally,
        max_unread_messages: int,
        wall_ns: Callable[[], int],
    ) -> None: ...
