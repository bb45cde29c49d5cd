"""Packets over the limit: skipped as they come, never held.

Whoever sent one learns which call it was about, so the request id is looked for among the
fields as they pass by. It may stand before the data or behind it. All else is thrown away.
"""

from __future__ import annotations

from enum import Enum

from polybus.dialects.gsb.codec import NO_PACKET
from polybus.dialects.gsb.sp import TOO_LARGE
from polybus.errors import BadFrame
from polybus.model.services import MAX_REQUEST_ID_BYTES

SERVICE_CALL, CALL_REPLY = 6, 7
# Where each of them has its request id.
ID_FIELDS = {SERVICE_CALL: 2, CALL_REPLY: 1}

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10


class _State(Enum):
    KIND = "the packet's kind"
    FIELD = "a field's tag, and its length"
    ID = "the request id"
    SKIP = "what nobody needs"


class Skipping:
    """One packet of `size` bytes. `feed` takes its bytes in any pieces; `left` is 0 at its end.

    `BadFrame` if it is no packet, or of a kind that may not be so large.
    """

    def __init__(self, size: int) -> None:
        self.left = size
        self.kind = 0
        self.request_id = b""
        self._state = _State.KIND
        self._held = bytearray()
        self._wanted = 0  # bytes of what is being skipped or kept

    def feed(self, data: memoryview) -> int:
        """Takes what belongs to the packet; how much that was."""
        mine = data[: self.left]
        at = 0
        while at < len(mine):
            at += self._step(mine[at:])
        self.left -= len(mine)
        if not self.left and (self._state is not _State.FIELD or self._held):
            raise BadFrame(NO_PACKET)
        return len(mine)

    def _step(self, data: memoryview) -> int:
        if self._state is _State.SKIP:
            return self._pass(data)
        if self._state is _State.ID:
            return self._keep(data)
        self._held.append(data[0])
        self._read_head()
        return 1

    def _pass(self, data: memoryview) -> int:
        taken = min(self._wanted, len(data))
        self._wanted -= taken
        if not self._wanted:
            self._state = _State.FIELD
        return taken

    def _keep(self, data: memoryview) -> int:
        taken = min(self._wanted, len(data))
        self.request_id += bytes(data[:taken])
        self._wanted -= taken
        if not self._wanted:
            self._state = _State.FIELD
        return taken

    def _read_head(self) -> None:
        """A tag and what follows it, once they are whole."""
        tag, at = _varint(self._held, 0)
        if at is None:
            return
        wire = tag & 7
        if wire in (FIXED32, FIXED64):
            self._begin(tag, 4 if wire == FIXED32 else 8)
            return
        value, at = _varint(self._held, at)
        if at is None:
            return
        if wire == VARINT and self._state is _State.FIELD:
            self._held.clear()
        elif wire == LENGTH:
            self._begin(tag, value)
        else:
            raise BadFrame(NO_PACKET)

    def _begin(self, tag: int, size: int) -> None:
        self._held.clear()
        if self._state is _State.KIND:
            self._judge(tag)
            self._state = _State.FIELD
            return
        self._wanted = size
        if size and tag == (ID_FIELDS[self.kind] << 3 | LENGTH):
            if size > MAX_REQUEST_ID_BYTES:
                raise BadFrame(TOO_LARGE)
            self.request_id = b""
            self._state = _State.ID
        elif size:
            self._state = _State.SKIP

    def _judge(self, tag: int) -> None:
        if tag & 7 != LENGTH or tag >> 3 not in ID_FIELDS:
            raise BadFrame(TOO_LARGE)
        self.kind = tag >> 3


def _varint(held: bytearray, at: int) -> tuple[int, int | None]:
    value = 0
    for place in range(at, len(held)):
        if place - at >= MAX_VARINT_BYTES:
            raise BadFrame(NO_PACKET)
        value |= (held[place] & 0x7F) << (7 * (place - at))
        if held[place] < 0x80:
            return value, place + 1
    return 0, None
