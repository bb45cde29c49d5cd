from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import Buffer

class Desk:
    generation: int
    opened: int
    answered: int
    failed: int
    next_due_s: float
    is_short: bool
    log: list[tuple[Call, int, float]] | None
    max_packet_bytes: int
    max_open_calls: int
    free_partials: int
    free_bytes: int
    window_bytes: int
    min_window: int
    max_window: int
    def __init__(
        self,
        clock: Callable[[], float],
        grant: Callable[[Call], Any],
        *,
        max_packet_bytes: int,
        max_open_calls: int,
        free_partials: int,
        free_bytes: int,
        window_bytes: int,
        min_window: int,
        max_window: int,
    ) -> None: ...

class Service:
    id: str
    end: End
    since_ms: int
    calls: int
    pending: int
    def __init__(self, name: str, end: End, since_ms: int) -> None: ...

class Route:
    service: Service
    address: bytes
    def __init__(self, service: Service, address: bytes) -> None: ...

class Call:
    caller: End
    service: Service
    end: End
    request_id: bytes
    id: bytes
    address: bytes
    begun_s: float
    request_bytes: int
    partials: int
    reply_bytes: int
    credit: int
    is_dry: bool
    def __init__(
        self,
        caller: End,
        route: Route,
        request_id: bytes,
        call_id: bytes,
        request_bytes: int,
        now_s: float,
    ) -> None: ...
    def restart_clock(self, now_s: float) -> None: ...
    def stop_clock(self, now_s: float) -> None: ...
    def go_on_clock(self, now_s: float) -> None: ...
    def due(self, now_s: float) -> float: ...
    def free_left(self, desk: Desk) -> int: ...
    def window(self, desk: Desk) -> int: ...

class End:
    calls: dict[bytes, Call]
    serving: dict[bytes, Call]
    services: dict[str, Service]
    routes: dict[bytes, Route]
    wanting: dict[Call, None]
    waiters: dict[End, None]
    generation: int
    full: bool
    credits: bool
    gone: bool
    halted: bool
    lifted: bool
    pinged: bool
    is_open: bool
    is_first: bool
    ipc: bool
    full_calls: int
    deadline_s: float
    unread_s: float
    halted_since_s: float
    heard_s: float
    caller_name: bytes
    def take_short_path(self, desk: Desk, push: Callable[[bytes], Any], ipc: bool) -> None: ...
    def receive(self, buffer: Buffer, start: int, end: int) -> int: ...
    def finish_large(self) -> bool: ...

def overdue(ends: Iterable[End], now_s: float) -> tuple[list[Call], float | None]: ...
