from collections.abc import Iterable
from typing import Any

from typing_extensions import Buffer

from polybus.kernel.blocks import Layout

MAX_GATHERED_BYTES: int

class BadPiece(ValueError): ...

def gather(
    pieces: Iterable[tuple[Layout, Buffer, int, int, int, int]],
    from_id: int,
    below_id: int,
    max_rows: int,
    max_bytes: int,
    by_piece: bool = False,
) -> tuple[Any, ...]: ...
