class Service:
    id: str
    end: End
    since_ms: int
    calls: int
    pending: int
    def __init__(self, id: str, end: End, since_ms: int) -> None: ...

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
    last_s: float
    unread_before_s: float
    dry_since_s: float
    def __init__(
        self,
        caller: End,
        route: Route,
        request_id: bytes,
        id: bytes,
        request_bytes: int,
        now_s: float,
    ) -> None: ...
    def restart_clock(self, now_s: float) -> None: ...

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
    full_calls: int
    deadline_s: float
    unread_s: float
    halted_since_s: float
    heard_s: float
    caller_name: bytes
