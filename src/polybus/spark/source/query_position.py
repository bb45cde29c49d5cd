"""How far a streaming query has come, as its checkpoint holds it: JSON.

    {"orders": {"0": 17, "1": 4}, "_query": "5f…"}

Names of topics never begin with `_`. Beside them stand:

- `_query`: an id that the query keeps through all its restarts.
- `_initial`: nothing was read yet. After a restart Spark may ask again where to begin,
  and "latest" would be another place then.
- `_since`: where shards begin that were not in the position before: all of them in a
  query's first batch, later those of new topics and of a reshard. So a batch that is
  planned again begins where it did, whatever the start of the range has become.

Spark compares positions as text: the same position is always written the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polybus.errors import UsageError
from polybus.spark.source.read_bounds import Offsets

QUERY, INITIAL, SINCE = "_query", "_initial", "_since"


@dataclass(frozen=True)
class QueryPosition:
    offsets: Offsets
    query: str = ""
    is_initial: bool = False
    since: Offsets = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        marks: dict[str, Any] = {QUERY: self.query}
        if self.is_initial:
            marks[INITIAL] = True
        if self.since:
            marks[SINCE] = _written(self.since)
        return {**_written(self.offsets), **marks}

    @classmethod
    def parse(cls, given: dict[str, Any]) -> QueryPosition:
        try:
            return cls(
                _read({name: one for name, one in given.items() if not name.startswith("_")}),
                str(given.get(QUERY, "")),
                bool(given.get(INITIAL)),
                _read(given.get(SINCE, {})),
            )
        except (AttributeError, TypeError, ValueError):
            raise UsageError(
                f"this checkpoint is not one of polybus ({str(given)[:64]}): use another "
                "checkpointLocation"
            ) from None

    def starts(self, end: QueryPosition) -> Offsets:
        """Where each shard of a batch that goes on from here to `end` begins."""
        begins_anew = self.is_initial and end.since
        known: Offsets = {} if begins_anew else self.offsets
        return {
            topic: {
                shard: known.get(topic, {}).get(shard, end.since.get(topic, {}).get(shard, offset))
                for shard, offset in shards.items()
            }
            for topic, shards in end.offsets.items()
        }

    def advanced(self, ends: Offsets, starts: Offsets) -> QueryPosition:
        """The next position; `starts` has where each shard of `ends` begins."""
        known: Offsets = {} if self.is_initial else self.offsets
        since = {
            topic: new
            for topic, shards in starts.items()
            if (new := {n: at for n, at in shards.items() if n not in known.get(topic, {})})
        }
        return QueryPosition(ends, self.query, since=since)


def _written(offsets: Offsets) -> dict[str, dict[str, int]]:
    return {
        topic: {str(shard): offset for shard, offset in sorted(shards.items())}
        for topic, shards in sorted(offsets.items())
    }


def _read(given: dict[str, dict[str, int]]) -> Offsets:
    return {
        topic: {int(shard): int(offset) for shard, offset in shards.items()}
        for topic, shards in given.items()
    }
