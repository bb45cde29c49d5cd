class Encoding:
    number: int
    def __init__(self, number: int) -> None: ...
    def count(self, encoded: bytes, sent: int) -> int: ...

class Framing:
    own: Encoding
