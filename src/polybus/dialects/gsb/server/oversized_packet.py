"""Packets over the size limit: skipped while they arrive, never held in memory.

The reply must name the call, and the call log records it. So the request id, the address and
the size of the data are extracted from the fields as they pass, in any order. The rest is
discarded.

As in protobuf, the last of several fields counts, and unknown fields are skipped.
"""

from __future__ import annotations

from google.protobuf.message import Message

from polybus.dialects.gsb.codec import NO_PACKET, read_varint
from polybus.dialects.gsb.gsb_pb2 import Packet
from polybus.dialects.gsb.service_address import MAX_LOGGED_ADDRESS_BYTES
from polybus.dialects.gsb.sp import TOO_LARGE
from polybus.errors import BadFrame

SERVICE_CALL = Packet.SERVICE_CALL_REQUEST_FIELD_NUMBER
CALL_REPLY = Packet.CALL_REPLY_FIELD_NUMBER
RELAY_CALL = Packet.RELAY_CALL_FIELD_NUMBER
SKIPPED = frozenset({SERVICE_CALL, CALL_REPLY, RELAY_CALL})
ADDRESS, REQUEST_ID, DATA = "address", "request_id", "data"
EXTRACTED = frozenset({ADDRESS, REQUEST_ID, DATA})

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


class OversizedPacket:
    """A packet of `size` bytes. `feed` takes its bytes in any pieces; `left` is 0 at its end.

    `feed` raises `BadFrame` if the bytes are not a packet, or one of a kind that must not be so
    large. A request id over `max_id_bytes` is dropped because no reply could carry it. A long
    address is truncated. `packet_type` may be that of another framing, whose calls and replies
    have the same numbers.
    """

    def __init__(self, size: int, max_id_bytes: int, packet_type: type[Message] = Packet) -> None:
        self.left = size
        self.kind = 0
        self.data_bytes = 0
        self._max_id_bytes = max_id_bytes
        self._kinds = packet_type.DESCRIPTOR.fields_by_number
        self._texts: dict[str, bytearray] = {}
        self._inner_left = 0  # bytes left of the call or reply; 0 between the packet's fields
        self._held = bytearray()  # an incomplete tag, with its length or value
        self._value_left = 0  # bytes left of a field's value
        self._text: bytearray | None = None  # where the value is collected, if it is extracted
        self._max_kept = 0

    @property
    def request_id(self) -> bytes:
        return bytes(self._texts.get(REQUEST_ID, b""))

    @property
    def address(self) -> bytes:
        return bytes(self._texts.get(ADDRESS, b""))

    def feed(self, data: memoryview) -> int:
        """Take the bytes of the packet from `data`. Returns their number."""
        mine = data[: self.left]
        at = 0
        while at < len(mine):
            is_inner = self._inner_left > 0
            rest = mine[at : at + self._inner_left] if is_inner else mine[at:]
            if self._value_left:
                taken = min(self._value_left, len(rest))
                if self._text is not None:
                    self._text += rest[: min(taken, self._max_kept - len(self._text))]
                self._value_left -= taken
            else:
                taken = 1
                self._held.append(rest[0])
                self._read_head()
            at += taken
            if is_inner:
                self._inner_left -= taken
                if not self._inner_left and (self._held or self._value_left):
                    raise BadFrame(NO_PACKET)  # a field extends beyond its message
        self.left -= len(mine)
        if not self.left:
            if self._inner_left or self._held or self._value_left or not self.kind:
                raise BadFrame(NO_PACKET)
            try:
                self.request_id.decode()
            except UnicodeDecodeError:
                raise BadFrame(NO_PACKET) from None
        return len(mine)

    def _read_head(self) -> None:
        """Parse a tag and its length or value, if they are complete."""
        tag, at = read_varint(self._held, 0)
        if at is None:
            return
        wire = tag & 7
        if wire in (FIXED32, FIXED64):
            self._begin(tag, 4 if wire == FIXED32 else 8)
            return
        value, at = read_varint(self._held, at)
        if at is None:
            return
        if wire == VARINT:
            self._begin(tag, 0)
        elif wire == LENGTH:
            self._begin(tag, value)
        else:
            raise BadFrame(NO_PACKET)

    def _begin(self, tag: int, size: int) -> None:
        """Begin a field whose value has `size` bytes."""
        self._held.clear()
        number = tag >> 3 if tag & 7 == LENGTH else 0  # no extracted field has another wire type
        if not self._inner_left and number in self._kinds:
            # The field is the call or reply: its own fields follow. Protobuf merges a second
            # one of the same kind; one of another kind replaces it.
            if number not in SKIPPED:
                raise BadFrame(TOO_LARGE)
            if number != self.kind:
                self.kind, self.data_bytes = number, 0
                self._texts.clear()
            self._inner_left = size
            return
        self._value_left, self._text = size, None
        name = self._name_of(number) if self._inner_left else None
        if name == DATA:
            self.data_bytes = size
        elif name is not None:
            text = self._texts[name] = bytearray()
            self._max_kept = MAX_LOGGED_ADDRESS_BYTES if name == ADDRESS else self._max_id_bytes
            if name == ADDRESS or size <= self._max_kept:
                self._text = text

    def _name_of(self, number: int) -> str | None:
        """Return the name of a field of the call or reply, if it is extracted."""
        message = self._kinds[self.kind].message_type
        field = message.fields_by_number.get(number) if message is not None else None
        return field.name if field is not None and field.name in EXTRACTED else None
