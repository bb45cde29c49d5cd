from collections.abc import Callable, Mapping
from typing import Any, final

from polybus.dialects.freud.server.unread_queue import Unread, Writer
from polybus.kernel.subscriber_table import SubscriberTable

@final
class Tally:
    received: int
    received_bytes: int
    delivered: int
    delivered_bytes: int

class Life:
    # Both hold what dialects/freud/server/topic_lifecycle.py says.
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
        registry: SubscriberTable,
        tally: Tally,
        max_unread_messages: int,
        wall_ns: Callable[[], int],
    ) -> None: ...
