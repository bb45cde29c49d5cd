"""The shards that a consumer holds, for all of its threads."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.assigned_shard import AssignedShard


class AssignedShards:
    """`generation` changes when all are lost: what was asked before is void then."""

    def __init__(self) -> None:
        self.generation = 0
        self._is_closed = False
        self._shards: dict[int, AssignedShard] = {}
        self._lock = Lock()

    def all(self) -> list[AssignedShard]:
        with self._lock:
            return list(self._shards.values())

    def get(self, number: int, epoch: int) -> AssignedShard | None:
        """If it is still held by this epoch."""
        shard = self._shards.get(number)
        return shard if shard is not None and shard.epoch == epoch else None

    def put(self, shard: AssignedShard, generation: int) -> bool:
        """A shard that was given to us. False if that was in a former life."""
        with self._lock:
            if generation != self.generation:
                return False
            old = self._shards.get(shard.number)
            if old is not None:
                old.is_open = old.is_held = False
            self._shards[shard.number] = shard
            shard.is_open = not self._is_closed
            return True

    def drop(self, shard: AssignedShard) -> None:
        with self._lock:
            shard.is_open = shard.is_held = False
            if self._shards.get(shard.number) is shard:
                del self._shards[shard.number]

    def drop_all(self) -> None:
        """All of them, at once."""
        with self._lock:
            self.generation += 1
            for shard in self._shards.values():
                shard.is_open = shard.is_held = False
            self._shards.clear()

    def close(self) -> list[AssignedShard]:
        """Nothing more of any is started; they stay ours until we leave."""
        with self._lock:
            self._is_closed = True
            for shard in self._shards.values():
                shard.is_open = False
            return list(self._shards.values())

    def start_release(self, number: int) -> bool:
        """The bus wants it for another. Was that news?"""
        with self._lock:
            shard = self._shards.get(number)
            if shard is None or shard.is_releasing:
                return False
            shard.is_open = False
            shard.is_releasing = True
            return True

    def has_unreported(self) -> bool:
        return any(shard.collect_finished() or shard.has_unreported for shard in self.all())

    def describe_held(self) -> list[dict[str, Any]]:
        """As a fetch tells it."""
        found = []
        for shard in self.all():
            held = {"shard": shard.number, "epoch": shard.epoch, "next": shard.next}
            if not shard.wants_rows:
                held |= {"paused": True, "releasing": shard.is_releasing}
            found.append(held)
        return found
