"""A connection whose far end is the bus itself: packets for it are handed to a function.

Parts of the bus call and serve like clients do (channels.py). They have a session like any
connection, so that calls, credits and subscriptions follow the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polybus.dialects.gsb import codec, sp

if TYPE_CHECKING:
    from polybus.bus.timers import Timers
    from polybus.dialects.gsb import gsb_pb2 as pb
    from polybus.kernel.fanout import PlainRoute
    from polybus.model.identity import Identity

HEAD_BYTES = sp.head_size(sp.Form.TCP)


class BusPipe:
    """A `ConnectionIO`. Packets are handed over in the next turn of the loop, in order."""

    is_unix = False
    certificate_digest = b""
    output = None

    def __init__(
        self, peer: str, identity: Identity, timers: Timers, take: Callable[[pb.Packet], None]
    ) -> None:
        self.peer = peer
        self.identity = identity
        self._timers = timers
        self._take = take
        self._written = bytearray()
        self._is_greeted = self._is_scheduled = False
        self.is_closed = False

    def write(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._written += data
        if not self._is_scheduled:
            self._is_scheduled = True
            self._timers.call_soon(self._hand_over)

    def write_many(self, chunks: list[bytes]) -> None:
        self.write(b"".join(chunks))

    def _hand_over(self) -> None:
        self._is_scheduled = False
        written, self._written = bytes(self._written), bytearray()
        at = 0
        if not self._is_greeted:
            self._is_greeted = True
            at = len(sp.GREETING)
        while at < len(written) and not self.is_closed:
            begin = at + HEAD_BYTES
            at = begin + int.from_bytes(written[at:begin], "big")
            self._take(codec.decode_packet(written[begin:at]))

    # --- the rest of a connection: nothing is ever in its way

    def backlog_bytes(self) -> int:
        return 0

    def unconfirmed_bytes(self) -> int:
        return 0

    def use_plain_route(self, route: PlainRoute) -> None: ...
    def pause_reading(self) -> None: ...
    def watch_hangup(self, hung_up: Callable[[], None]) -> None: ...
    def resume_reading(self) -> None: ...
    def redeliver(self) -> None: ...
    def retain_slot(self) -> None: ...
    def release_slot(self) -> None: ...

    def has_failed(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True
