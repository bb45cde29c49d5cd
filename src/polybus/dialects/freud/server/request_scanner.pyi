from collections.abc import Callable
from typing import Literal, final

from typing_extensions import Buffer

Reason = Literal[
    "too_large", "too_short", "unknown_type", "truncated", "trailing_bytes", "bad_name"
]

TOO_LARGE: Reason
TOO_SHORT: Reason
UNKNOWN_TYPE: Reason
TRUNCATED: Reason
TRAILING_BYTES: Reason
BAD_NAME: Reason
REASONS: tuple[Reason, ...]

MAX_SCAN_BODY_BYTES: int
MAX_SCAN_GROUPS: int
MAX_GROUP_MESSAGES: int

@final
class ProduceRun:
    @property
    def topic(self) -> bytes: ...
    @property
    def count(self) -> int: ...
    @property
    def offsets(self) -> bytes: ...
    @property
    def bodies(self) -> bytes: ...
    def part(self, start: int, end: int) -> ProduceRun: ...

@final
class GetRun:
    unanswered: int
    @property
    def subscriber(self) -> bytes: ...
    @property
    def count(self) -> int: ...
    @property
    def max_blocking_s(self) -> int: ...
    @property
    def records(self) -> bool: ...

@final
class SingleRequest:
    @property
    def type(self) -> int: ...
    @property
    def subject(self) -> bytes: ...

@final
class MalformedFrame:
    @property
    def reason(self) -> Reason: ...
    @property
    def closes(self) -> bool: ...

Group = ProduceRun | GetRun | SingleRequest | MalformedFrame

@final
class ScanResult:
    @property
    def consumed(self) -> int: ...
    @property
    def groups(self) -> list[Group]: ...
    @property
    def more(self) -> bool: ...
    @property
    def bad(self) -> bool: ...

@final
class RequestScanner:
    def __init__(
        self, max_frame_bytes: int, is_name: Callable[[bytes], bool], *, with_header: bool = False
    ) -> None: ...
    @property
    def max_frame_bytes(self) -> int: ...
    @property
    def with_header(self) -> bool: ...
    def frame_bytes(self, header: bytes) -> int: ...
    def scan(self, buffer: Buffer, start: int, end: int) -> ScanResult: ...
