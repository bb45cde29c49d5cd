from collections.abc import Callable
from typing import Literal, final

from typing_extensions import Buffer

Reason = Literal[
    "too_large", "unknown_type", "truncated", "trailing_bytes", "reserved_body", "bad_name"
]

TOO_LARGE: Reason
UNKNOWN_TYPE: Reason
TRUNCATED: Reason
TRAILING_BYTES: Reason
RESERVED_BODY: Reason
BAD_NAME: Reason
REASONS: tuple[Reason, ...]

MAX_SCAN_BODY_BYTES: int
MAX_SCAN_GROUPS: int
MAX_GROUP_MESSAGES: int

@final
class Produces:
    @property
    def topic(self) -> bytes: ...
    @property
    def count(self) -> int: ...
    @property
    def offsets(self) -> bytes: ...
    @property
    def bodies(self) -> bytes: ...

@final
class Gets:
    @property
    def subscriber(self) -> bytes: ...
    @property
    def count(self) -> int: ...
    @property
    def max_blocking_s(self) -> int: ...
    @property
    def records(self) -> bool: ...

@final
class Request:
    @property
    def type(self) -> int: ...
    @property
    def subject(self) -> bytes: ...

@final
class Malformed:
    @property
    def reason(self) -> Reason: ...
    @property
    def closes(self) -> bool: ...

Group = Produces | Gets | Request | Malformed

@final
class Scanned:
    @property
    def consumed(self) -> int: ...
    @property
    def groups(self) -> list[Group]: ...
    @property
    def more(self) -> bool: ...
    @property
    def bad(self) -> bool: ...

@final
class Scanner:
    def __init__(self, max_frame_bytes: int, is_name: Callable[[bytes], bool]) -> None: ...
    @property
    def max_frame_bytes(self) -> int: ...
    def scan(self, buffer: Buffer, start: int, end: int) -> Scanned: ...
