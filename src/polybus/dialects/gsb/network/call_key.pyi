WINDOW: int

class CallKey:
    own: bytes
    node: bytes
    exchange: bytes
    own_instance: int
    instance: int
    def __init__(
        self,
        secret: bytes,
        own: bytes,
        own_instance: int,
        node: bytes,
        instance: int,
        exchange: bytes,
    ) -> None: ...
    def sign(self, address: bytes, data: bytes) -> tuple[int, bytes]: ...
    def matches(self, counter: int, address: bytes, data: bytes, mac: bytes) -> bool: ...
    def accept(self, counter: int) -> bool: ...
