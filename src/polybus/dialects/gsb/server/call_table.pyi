from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

from typing_extensions import Buffer

from polybus.dialects.gsb.network.call_key import CallKey
from polybus.dialects.gsb.server.call_router import CallRouter

# Every CallEndpoint is a GsbSession, or a session of another framing, which is one.
from polybus.dialects.gsb.server.session import GsbSession
from polybus.model.identity import Identity

class Refusal(IntEnum):
    NOT_REFUSED = 0
    BAD_REQUEST_ID = 1
    ID_IN_USE = 2
    TOO_MANY_CALLS = 3
    UNANNOUNCED_RUN = 4
    FORGED_CALL = 5
    TOO_MANY_HOPS = 6
    FULL_WAY = 7

class CallTable:
    generation: int
    opened: int
    next_due_s: float
    log: list[tuple[OpenCall, int, float]] | None
    max_packet_bytes: int
    max_open_calls: int
    free_partials: int
    free_bytes: int
    window_bytes: int
    min_window: int
    max_window: int
    hard_limit_bytes: int
    max_hops: int
    node: bytes
    calling_nodes: dict[bytes, CallingNode]
    def __init__(
        self,
        clock: Callable[[], float],
        router: CallRouter,
        codes: Iterable[int],
        *,
        max_packet_bytes: int,
        max_open_calls: int,
        free_partials: int,
        free_bytes: int,
        window_bytes: int,
        min_window: int,
        max_window: int,
        hard_limit_bytes: int,
        max_hops: int,
    ) -> None: ...
    def end(self, call: OpenCall, code: int) -> bool: ...
    def count_end(self, code: int) -> None: ...
    @property
    def ended(self) -> dict[int, int]: ...

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
    def stop_clock(self, now_s: float) -> None: ...
    def resume_clock(self, now_s: float) -> None: ...
    def free_left(self) -> int: ...
    def missing_credit(self) -> int: ...
    def can_forward(self, is_partial: bool) -> bool: ...

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
    full_calls: int
    deadline_s: float
    unread_s: float
    halted_since_s: float
    heard_s: float
    caller_name: bytes
    def attach(
        self, table: CallTable, push: Callable[[bytes], Any], ipc: bool, length_size: int = 8
    ) -> None: ...
    def has_room(self) -> bool: ...
    def receive(self, buffer: Buffer, start: int, end: int) -> int: ...
    def finish_large(self) -> bool: ...
    def take_canonical(self, payload: bytes) -> bool: ...
    def call(self, address: bytes, request_id: bytes, data: bytes) -> bool: ...
    def open_call(
        self, route: Route, request_id: bytes, data: bytes, deadline_s: float
    ) -> None: ...
    def reply(self, call_id: bytes, code: int, kind: int, data: bytes) -> bool: ...
    def send_reply(self, request_id: bytes, code: int, kind: int, data: bytes) -> None: ...

def overdue(
    endpoints: Iterable[GsbSession], now_s: float
) -> tuple[list[OpenCall], float | None]: ...
