from typing_extensions import Buffer

class BadEntry(ValueError): ...

def read_head(
    value: Buffer, magic: bytes, checksum: bool
) -> tuple[int, int, int, int, int, int, bytes, bytes | tuple[()], int, int]: ...
