import builtins
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

from polybus.kernel.framing import Encoding, Framing
from polybus.kernel.subscriber_table import SubscriberTable

END: int
CONTROL_FRAME: int
BLOCKED: int
BAD_FRAME: int
FRAGMENTS_FIRST: int

class Source:
    identity: int
    trusted: bool
    messages: int
    bytes: int
    denied: int
    unheard: int
    def __init__(self, identity: int, *, trusted: bool = False) -> None: ...
    def reclassify(self, identity: int) -> None: ...

class CollectedBatch:
    topic: bytes
    first_id: int
    count: int
    offsets: bytes
    bodies: bytes

class RouteResult:
    consumed: int
    stop: int
    code: int
    topic: bytes
    blocker: Any
    outputs: list[tuple[Any, bytes]]
    collected: Sequence[CollectedBatch]
    fragments: Sequence[tuple[bytes, bytes]]

class PlainRoute:
    def __init__(self, fanout: Fanout, source: Source, framing: Framing) -> None: ...

class Fanout(SubscriberTable):
    messages: int
    bytes: int
    delivered: int
    delivered_bytes: int
    denied: int
    unheard: int
    too_large: int  # messages that a reader's encoding has no way to carry, once for each reader
    def __init__(self, judge: Callable[[int, builtins.bytes], bool]) -> None: ...
    def route(
        self, framing: Framing, source: Source, buffer: Buffer, start: int, end: int
    ) -> RouteResult: ...
    def publish(
        self,
        source: Source,
        topic: builtins.bytes,
        offsets: Buffer,
        bodies: Buffer,
        skip: Encoding | None = None,
    ) -> RouteResult: ...
    def encode_for(
        self, number: int, topic: builtins.bytes, offsets: Buffer, bodies: Buffer
    ) -> builtins.bytes: ...
