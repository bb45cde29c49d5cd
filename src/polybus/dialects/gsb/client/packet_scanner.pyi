from typing import Any

from typing_extensions import Buffer

OTHER: int
REPLY: int
REQUEST: int

# Packets are tuples by their kind, see the module's docstring.
def scan(
    buffer: Buffer, start: int, end: int, is_ipc: bool, max_packet_bytes: int
) -> tuple[int, list[tuple[Any, ...]], int]: ...
def read_packet(frame: Buffer, is_ipc: bool) -> tuple[Any, ...]: ...
def encode_call(is_ipc: bool, address: bytes, request_id: bytes, data: bytes | int) -> bytes: ...
def encode_reply(
    is_ipc: bool, request_id: bytes, code: int, partial: bool, data: bytes | int
) -> bytes: ...
