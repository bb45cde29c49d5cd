"""What can be set on a Freud client, with the reason for each default."""

from __future__ import annotations

import os
from dataclasses import dataclass

from polybus.dialects.freud import codec
from polybus.errors import UsageError
from polybus.model.address import Address
from polybus.model.socket_path import find_socket

SOCKET_NAME = "freud.sock"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # Should be the bus's own: what is larger it answers Malformed Request, and hangs up.
    max_frame_bytes: int = codec.DEFAULT_MAX_FRAME_BYTES
    # Iterating over a subscription asks for up to so many messages at once. What was
    # fetched and not yet looked at is lost if the program dies; 1 fetches one by one.
    prefetch: int = 256
    # Finding the bus, and its first answer.
    connect_timeout_s: float = 10.0
    # How long a request waits for its answer; a Produce may be held up by a full push reader.
    answer_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        codec.check_max_frame_bytes(self.max_frame_bytes)
        for name in ("prefetch", "connect_timeout_s", "answer_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0")

    @property
    def max_answer_bytes(self) -> int:
        """The largest answer that is believed: a record of the largest message there can be."""
        own = self.max_frame_bytes + codec.RECORD_HEADER.size
        return max(codec.DEFAULT_MAX_ANSWER_BYTES, own)


def default_address() -> Address:
    """Freud's socket of this user's bus; if there is none, that of the machine's, root's."""
    return Address.parse(f"unix:{find_socket(SOCKET_NAME, os.environ)}")
