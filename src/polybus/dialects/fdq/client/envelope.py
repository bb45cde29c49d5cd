"""A message on its way in (`MessageRequest`) and on its way out (`Envelope`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from polybus.errors import UsageError


class MessageRequest(NamedTuple):
    """One message of a batch. A key of None is none; an empty one is a key."""

    shard_key: str | None
    message: bytes
    headers: Mapping[str, bytes] | None = None


class Envelope:
    """A message as a handler gets it, and where it stands.

    A plain class with slots and no checks: there is one for every message.
    """

    __slots__ = (
        "_run",
        "delivery",
        "executor_index",
        "headers",
        "id",
        "insertion_time",
        "message",
        "offset",
        "shard",
        "shard_epoch",
        "shard_index",
        "shard_key",
        "timestamp_ns",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        id: int,  # noqa: A002  # its name in the interface
        shard: int,
        offset: int,
        timestamp_ns: int,
        insertion_time: int,
        shard_key: str | None,
        message: bytes,
        headers: dict[str, bytes],
        shard_index: int = 0,
        executor_index: int = 0,
        delivery: int = 1,
        shard_epoch: int = 0,
        run: Any = None,
    ) -> None:
        self.topic = topic
        self.id = id
        self.shard = shard
        self.offset = offset
        self.timestamp_ns = timestamp_ns  # the bus's, of its commit
        self.insertion_time = insertion_time  # the producer's, milliseconds since 1970
        self.shard_key = shard_key
        self.message = message
        self.headers = headers
        self.shard_index = shard_index  # among the shards that were opened together
        self.executor_index = executor_index
        self.delivery = delivery  # 1 for the first
        self.shard_epoch = shard_epoch  # of the assignment it was fetched under; 0 if replayed
        self._run = run  # what a consumer knows of this delivery

    def transaction(self) -> Any:
        """What is produced inside, and the ack of this message, are one atomic step."""
        if self._run is None:
            raise UsageError("this message belongs to no group: only a consumer's can be acked")
        return self._run.transaction(self)

    def __repr__(self) -> str:
        return (
            f"<Envelope {self.topic} id={self.id} shard={self.shard} offset={self.offset}"
            f" key={self.shard_key!r} {len(self.message)} bytes>"
        )
