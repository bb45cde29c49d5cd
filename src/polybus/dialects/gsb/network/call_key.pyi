WINDOW: int

class CallKey:
    own: bytes
    node: bytes
    own_instance: int
    instance: int
    def __init__(
        self, secret: bytes, own: bytes, own_instance: int, node: bytes, instance: int
    ) -> None: ...
    def accept(self, counter: int) -> bool: ...
