"""What a consumer was asked for, checked before anything is started."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polybus.dialects.fdq.client.assigned_shard import MAX_EXECUTORS
from polybus.dialects.fdq.client.retry_schedule import Backoff
from polybus.errors import UsageError
from polybus.model import topic_name

STARTS = ("earliest", "latest")
MAX_NAME_BYTES = 128  # of a consumer, of a group


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    topic: str
    name: str
    handler: Callable[[Any], Any]
    group: str = "default"
    start: str = "earliest"
    executors: int = 1
    batch: bool = False
    max_deliver: int = 5
    handler_timeout_s: float = 300.0
    create: bool = True
    heartbeat_s: float = 2.0
    dead_s: float = 5.0
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        if not callable(self.handler):
            raise UsageError("a handler is a function of one message")
        topic_name.check_topic_name(self.topic)
        for what, name in (("name", self.name), ("group", self.group)):
            if not _is_name(name):
                raise UsageError(f"{what}: 1 to {MAX_NAME_BYTES} bytes of text")
        if self.start not in STARTS:
            raise UsageError(f"start is one of {', '.join(STARTS)}, not {self.start!r}")
        if not _is_number(self.executors) or not 1 <= self.executors <= MAX_EXECUTORS:
            raise UsageError(f"executors is from 1 to {MAX_EXECUTORS}")
        if not _is_number(self.max_deliver) or self.max_deliver < 1:
            raise UsageError("max_deliver is at least 1")
        if not self.handler_timeout_s > 0:
            raise UsageError("handler_timeout_s is more than 0")
        if not 0 < self.heartbeat_s < self.dead_s < math.inf:
            raise UsageError("heartbeat_s is more than 0, and less than dead_s")

    @property
    def join_fields(self) -> dict[str, Any]:
        """The fields of `group.join` beside those that every call has."""
        return {
            "start": self.start,
            "max_deliver": self.max_deliver,
            "heartbeat_ms": max(1, round(self.heartbeat_s * 1000)),
            "dead_ms": max(1, round(self.dead_s * 1000)),
        }


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and 1 <= len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int)
