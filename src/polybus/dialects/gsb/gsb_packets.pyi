from typing_extensions import Buffer

from polybus.kernel.framing import Encoding

ID_BYTES: int
MAX_HOPS: int
MAX_ADDRESS: int
MAX_FREE_PARTIALS: int
MAX_FREE_BYTES: int
RELAY_BYTES: int

def frame(ipc: bool, payload: bytes) -> bytes: ...
def read(
    buffer: Buffer, start: int, end: int
) -> tuple[int, bytes, bytes, bytes] | tuple[int, bytes, int, int, bytes] | None: ...

class GsbEncoding(Encoding):
    ipc: bool
    caller: bytes
    def __init__(self, number: int, ipc: bool) -> None: ...
