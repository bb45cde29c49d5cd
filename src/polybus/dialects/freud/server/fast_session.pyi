from collections.abc import Callable, Mapping
from typing import Any, final

from typing_extensions import Buffer

from polybus.dialects.freud.server.unread_queue import ChunkWriter, UnreadQueue
from polybus.kernel.fanout import Source
from polybus.kernel.subscriber_table import SubscriberTable

LIVE: int
OPEN: int
NOT_HALTED: int

@final
class MessageCounts:
    received: int
    received_bytes: int
    delivered: int
    delivered_bytes: int

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
class FastPath:
    def __init__(
        self,
        topics: Mapping[bytes, TopicBase],
        readers: Mapping[bytes, UnreadQueue],
        subscribers: SubscriberTable,
        counts: MessageCounts,
        max_unread_messages: int,
        wall_ns: Callable[[], int],
    ) -> None: ...

class FastSession:
    phase: int
    halt: int
    # The types of these are narrowed by FreudSession in session.py.
    pending: Any
    answers: Any
    pipe: Any
    uncommitted: int
    received_messages: int
    received_bytes: int
    sent_messages: int
    sent_bytes: int
    def enable_fast_path(
        self, path: FastPath, source: Source, account: int | str | None, max_frame_bytes: int
    ) -> None: ...
    def receive(self, buffer: Buffer, start: int, end: int) -> int: ...
