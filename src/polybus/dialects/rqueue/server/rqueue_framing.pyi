from polybus.kernel.framing import Encoding, Framing

REASONS: tuple[str, ...]

class RqueueEncoding(Encoding):
    max_payload: int
    def __init__(self, number: int, max_payload: int) -> None: ...

class RqueueFraming(Framing):
    max_payload: int
    def __init__(self, own: RqueueEncoding) -> None: ...
