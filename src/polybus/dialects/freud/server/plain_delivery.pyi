from collections.abc import Callable, Mapping
from typing import Any, final

from polybus.dialects.freud.server.request_scanner import ProduceRun
from polybus.dialects.freud.server.unread_queue import ChunkWriter
from polybus.kernel.subscriber_table import SubscriberTable

UNREAD: str
LIVE: int

@final
class MessageCounts:
    received: int
    received_bytes: int
    delivered: int
    delivered_bytes: int
    def add_received(self, messages: int, size: int) -> None: ...

class IncarnationBase:
    # The types of both are narrowed by Incarnation in topic_lifecycle.py.
    readers: dict[bytes, Any]
    buffer: list[Any]
    def __init__(self, name: bytes, /) -> None: ...
    @property
    def name(self) -> bytes: ...
    @property
    def writer(self) -> ChunkWriter: ...

class TopicBase:
    state: int
    current: Any
    marked: list[Any]
    is_restricted: bool
    def __init__(self, name: bytes, /) -> None: ...
    @property
    def name(self) -> bytes: ...

@final
class PlainDelivery:
    def __init__(
        self,
        topics: Mapping[bytes, TopicBase],
        readers: Mapping[bytes, Any],
        subscribers: SubscriberTable,
        counts: MessageCounts,
        max_unread_messages: int,
        wall_ns: Callable[[], int],
    ) -> None: ...
    # The type of a reader is narrowed by PullReaders in pull_reader.py.
    def find_reader(self, account: int | str | None, reader_id: bytes) -> Any: ...
    def charge(self, current: IncarnationBase, size: int, count: int) -> str | None: ...
    def release(self, current: IncarnationBase, size: int) -> None: ...
    def deliver(self, current: IncarnationBase, first_id: int, run: ProduceRun) -> None: ...
