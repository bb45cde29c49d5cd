"""The position of a streaming query, as JSON in its checkpoint.

    {"orders": {"0": 17, "1": 4}, "_query": "5f…"}

Topic names never begin with `_`. Keys that do:

- `_query`: an id that the query keeps across restarts.
- `_initial`: nothing was read yet. Spark may ask for the initial offset again after a restart,
  and "latest" would be another offset by then.
- `_since`: the first offsets of shards that the previous position did not have: all shards in a
  query's first batch, later those of new topics and of a reshard. A batch that is planned again
  therefore starts at the same offsets, even if the log was trimmed or has grown.

Spark compares positions as text, so equal positions must be serialized equally.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polybus.errors import UsageError
from polybus.spark.source.read_bounds import Offsets

QUERY, INITIAL, SINCE = "_query", "_initial", "_since"


@dataclass(frozen=True)
class QueryPosition:
    """Offsets of all shards of a query."""

    offsets: Offsets
    query: str = ""
    is_initial: bool = False
    since: Offsets = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        marks: dict[str, Any] = {QUERY: self.query}
        if self.is_initial:
            marks[INITIAL] = True
        if self.since:
            marks[SINCE] = _to_json(self.since)
        return {**_to_json(self.offsets), **marks}

    @classmethod
    def parse(cls, given: dict[str, Any]) -> QueryPosition:
        """Return the position; raises `UsageError` if it is not a position of polybus."""
        try:
            topics = {name: shards for name, shards in given.items() if not name.startswith("_")}
            return cls(
                _from_json(topics),
                str(given.get(QUERY, "")),
                bool(given.get(INITIAL)),
                _from_json(given.get(SINCE, {})),
            )
        except (AttributeError, TypeError, ValueError):
            raise UsageError(
                f"this checkpoint does not belong to polybus ({str(given)[:64]}); use another "
                "checkpointLocation"
            ) from None

    def starts(self, end: QueryPosition) -> Offsets:
        """Return the first offset of each shard of the batch from this position to `end`."""
        # After a restart Spark may pass a new initial position; `end.since` has the original start.
        is_first_batch = self.is_initial and end.since
        known: Offsets = {} if is_first_batch else self.offsets
        return {
            topic: {
                shard: known.get(topic, {}).get(shard, end.since.get(topic, {}).get(shard, offset))
                for shard, offset in shards.items()
            }
            for topic, shards in end.offsets.items()
        }

    def advanced(self, ends: Offsets, starts: Offsets) -> QueryPosition:
        """Return the next position. `starts` are the first offsets of the shards of `ends`."""
        known: Offsets = {} if self.is_initial else self.offsets
        since = {
            topic: new
            for topic, shards in starts.items()
            if (new := {n: at for n, at in shards.items() if n not in known.get(topic, {})})
        }
        return QueryPosition(ends, self.query, since=since)


def _to_json(offsets: Offsets) -> dict[str, dict[str, int]]:
    return {
        topic: {str(shard): offset for shard, offset in sorted(shards.items())}
        for topic, shards in sorted(offsets.items())
    }


def _from_json(given: dict[str, dict[str, int]]) -> Offsets:
    return {
        topic: {int(shard): int(offset) for shard, offset in shards.items()}
        for topic, shards in given.items()
    }
