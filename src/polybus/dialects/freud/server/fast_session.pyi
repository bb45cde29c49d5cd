from typing import Any

from typing_extensions import Buffer

from polybus.dialects.freud.server.ephemeral_topic import ShortPath
from polybus.kernel.fanout import Source

class ShortSession:
    _blocked: bool
    _resting: bool
    _hung_up: bool
    _finished: bool
    _gone: bool
    _closing: bool
    # What these are is said where they are set, in dialects/freud/server/session.py.
    _waiting_on: Any
    _todo: Any
    _answers: Any
    _pipe: Any
    _unsettled: int
    received_messages: int
    received_bytes: int
    sent_messages: int
    sent_bytes: int
    def take_short_path(
        self, path: ShortPath, source: Source, account: int | str | None, max_frame_bytes: int
    ) -> None: ...
    def receive(self, buffer: Buffer, start: int, end: int) -> int: ...
