from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import Buffer

from polybus.dialects.gsb.network.call_key import CallKey

# Every CallEndpoint is a GsbSession, or a session of another framing, which is one.
from polybus.dialects.gsb.server.session import GsbSession
from polybus.model.identity import Identity

class CallTable:
    generation: int
    opened: int
    answered: int
    failed: int
    next_due_s: float
    fast_path_enabled: bool
    log: list[tuple[OpenCall, int, float]] | None
    max_packet_bytes: int
    max_open_calls: int
    free_partials: int
    free_bytes: int
    window_bytes: int
    min_window: int
    max_window: int
    node: bytes
    calling_nodes: dict[bytes, CallingNode]
    def __init__(
        self,
        clock: Callable[[], float],
        grant: Callable[[OpenCall], Any],
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
    endpoint: GsbSession
    since_ms: int
    calls: int
    pending: int
    def __init__(self, name: str, endpoint: GsbSession, since_ms: int) -> None: ...

class NodeService(Service):
    key: CallKey
    def __init__(self, node: str, link: GsbSession, key: CallKey) -> None: ...

class Route:
    service: Service
    address: bytes
    def __init__(self, service: Service, address: bytes) -> None: ...

class NodeAccount:
    calls: int
    failures: int
    request_bytes: int
    reply_bytes: int
    def add(self, request_bytes: int, reply_bytes: int, has_failed: bool) -> None: ...

class CallingNode:
    name: bytes
    identity: Identity
    account: NodeAccount
    key: CallKey | None
    def __init__(self, identity: Identity) -> None: ...

class OpenCall:
    caller: GsbSession
    service: Service
    endpoint: GsbSession
    request_id: bytes
    id: bytes
    address: bytes
    begun_s: float
    request_bytes: int
    partials: int
    reply_bytes: int
    credit: int
    is_out_of_credit: bool
    deadline_s: float
    free_partials: int
    free_bytes: int
    origin: Identity | None
    account: NodeAccount | None
    def __init__(
        self,
        caller: GsbSession,
        route: Route,
        request_id: bytes,
        call_id: bytes,
        request_bytes: int,
        now_s: float,
    ) -> None: ...
    def restart_clock(self, now_s: float) -> None: ...
    def stop_clock(self, now_s: float) -> None: ...
    def resume_clock(self, now_s: float) -> None: ...
    def due(self, now_s: float) -> float: ...
    def free_left(self) -> int: ...
    def window(self, table: CallTable) -> int: ...

class CallEndpoint:
    calls: dict[bytes, OpenCall]
    serving: dict[bytes, OpenCall]
    services: dict[str, Service]
    routes: dict[bytes, Route]
    awaiting_credit: dict[OpenCall, None]
    waiters: dict[GsbSession, None]
    generation: int
    full: bool
    credits: bool
    gone: bool
    halted: bool
    draining: bool
    pinged: bool
    is_open: bool
    is_first: bool
    is_link: bool
    is_link_up: bool
    ipc: bool
    has_fast_path: bool
    full_calls: int
    deadline_s: float
    unread_s: float
    halted_since_s: float
    heard_s: float
    caller_name: bytes
    def attach_fast_path(
        self, table: CallTable, push: Callable[[bytes], Any], ipc: bool, length_size: int = 8
    ) -> None: ...
    def receive(self, buffer: Buffer, start: int, end: int) -> int: ...
    def finish_large(self) -> bool: ...

def overdue(
    endpoints: Iterable[GsbSession], now_s: float
) -> tuple[list[OpenCall], float | None]: ...
