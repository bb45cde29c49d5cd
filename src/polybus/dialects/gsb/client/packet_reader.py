"""Bytes from the bus's socket, as packets.

One buffer is read into and walked through by the kernel, again and again. A packet that
is larger than that gets a buffer of its own, into which the rest of it comes straight
from the socket, and its data stays where it is.
"""

from __future__ import annotations

from typing import Any, cast

from polybus.dialects.gsb import sp
from polybus.dialects.gsb.client.packet_scanner import read_packet, scan
from polybus.errors import BadFrame
from polybus.model.limits import KIB

# One system call brings this much; more gains nothing, less costs calls.
READ_BUFFER_BYTES = 256 * KIB

# As the kernel gives it: a tuple by its kind.
Packet = tuple[Any, ...]


class PacketReader:
    """`room` is where to put bytes; `added` says how many were, and gives the packets that
    are whole now. `BadFrame` ends it: the stream cannot be understood any more.
    """

    def __init__(self, is_ipc: bool, max_packet_bytes: int) -> None:
        self._is_ipc = is_ipc
        self._max_packet_bytes = max_packet_bytes
        self._greeted = False
        self._main = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._main)
        self._large = False  # is the buffer that of one large packet?
        self._filled = 0

    def free_space(self) -> memoryview:
        return self._view[self._filled :]

    def on_bytes(self, nbytes: int) -> list[Packet]:
        self._filled += nbytes
        if self._large:
            return self._large_packet()
        return self._packets() if self._greeted or self._check_greeting() else []

    def _check_greeting(self) -> bool:
        size = len(sp.GREETING)
        sp.check_greeting(bytes(self._main[: min(self._filled, size)]))
        if self._filled < size:
            return False
        self._compact(size)
        self._greeted = True
        return self._filled > 0

    def _packets(self) -> list[Packet]:
        try:
            consumed, packets, wanted = scan(
                self._main, 0, self._filled, self._is_ipc, self._max_packet_bytes
            )
        except ValueError as error:
            raise BadFrame(str(error)) from None
        if consumed:
            self._compact(consumed)
        if wanted > READ_BUFFER_BYTES:
            self._grow(wanted)
        return packets

    def _compact(self, consumed: int) -> None:
        """Only what stands behind so many bytes."""
        rest = self._filled - consumed
        if rest:
            self._view[:rest] = self._view[consumed : self._filled]
        self._filled = rest

    def _grow(self, size: int) -> None:
        frame = bytearray(size)
        frame[: self._filled] = self._view[: self._filled]
        self._view = memoryview(frame)
        self._large = True

    def _large_packet(self) -> list[Packet]:
        if self._filled < len(self._view):
            return []
        frame = cast(bytearray, self._view.obj)
        self._view, self._large, self._filled = memoryview(self._main), False, 0
        return [read_packet(frame, self._is_ipc)]
