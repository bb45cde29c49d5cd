"""The checkpoint of a replay: its plan and its position, two files in a folder.

    replay.json     the arguments, and the start and end of each shard. The first run fixes them,
                    so that messages that come later are not replayed.
    position.json   the part that is being written: its number and its offsets

A part is stored before it is published as transaction `number` of the replay's name. After a kill
the next run repeats the stored part. If it was published, the bus knows the number, and nothing is
published twice.

Within a shard ids and the bus's times rise with offsets, so --from and --to are one offset per
shard.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from polybus.errors import Damaged, UsageError
from polybus.model.start_point import EARLIEST, LATEST, parse_start, parse_time_ns
from polybus.spark.archive.archive_folder import explain_write_errors, write_durably
from polybus.spark.source.log_access import LogAccess, ShardOffsets
from polybus.spark.source.partitions import OffsetRange, limit_rows

Ends = dict[int, int]  # shard → offset
PLAN, POSITION = "replay.json", "position.json"
VERSION = 1


def offsets_at(access: LogAccess, topic: str, place: str, shards: dict[int, ShardOffsets]) -> Ends:
    """Return the first offset of each shard that is not before the start point."""
    wanted = parse_start(place)
    if wanted == EARLIEST:
        return {shard: in_log.start for shard, in_log in shards.items()}
    if wanted == LATEST:
        return {shard: in_log.end for shard, in_log in shards.items()}
    if isinstance(wanted, int):
        offsets = {n: access.find_id(topic, n, wanted) for n in shards}
    else:
        offsets = {n: access.find_time(topic, n, parse_time_ns(place)) for n in shards}
    return {n: min(max(offset, shards[n].start), shards[n].end) for n, offset in offsets.items()}


@dataclass(frozen=True)
class ReplayPlan:
    """The arguments and bounds of a replay. `ends` is None if it follows the log."""

    name: str
    asked: Mapping[str, Any]
    starts: Ends
    ends: Ends | None


@dataclass(frozen=True)
class ReplayPosition:
    """Part `number` goes from `at` to `to`. If these are equal, no part is in progress."""

    number: int
    at: Ends
    to: Ends
    rows: int = 0  # replayed by the parts before it
    version: int = field(default=VERSION)

    def ranges(self) -> list[OffsetRange]:
        """Return the ranges of the part. Their topic is that of the replay, not repeated here."""
        return [
            OffsetRange("", shard, self.at[shard], end)
            for shard, end in self.to.items()
            if self.at[shard] < end
        ]

    def done(self, rows: int) -> ReplayPosition:
        """Return the position after this part."""
        return replace(self, number=self.number + 1, at=self.to, rows=self.rows + rows)


class ReplayCheckpoint:
    """The files of a checkpoint. Two replays with one checkpoint publish the same parts, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plan(self, asked: Mapping[str, Any]) -> ReplayPlan | None:
        """Return the stored plan, None at first; raises `UsageError` if the arguments differ."""
        stored = self._read(PLAN)
        if stored is None:
            return None
        try:
            ends = None if stored["ends"] is None else _offsets(stored["ends"])
            plan = ReplayPlan(stored["name"], stored["asked"], _offsets(stored["starts"]), ends)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Damaged(f"{self._folder / PLAN} is damaged; use another --checkpoint") from None
        for option, value in asked.items():
            before = plan.asked.get(option)
            if before != value:
                raise UsageError(
                    f"this checkpoint belongs to another replay: {option} was {_shown(before)}, "
                    f"got {_shown(value)}; use another --checkpoint, or the same arguments"
                )
        return plan

    def begin(self, asked: Mapping[str, Any], starts: Ends, ends: Ends | None) -> ReplayPlan:
        """Store and return a new plan."""
        plan = ReplayPlan(f"replay/{uuid.uuid4().hex}", dict(asked), starts, ends)
        self._write(PLAN, {"version": VERSION, **asdict(plan)})
        return plan

    def position(self, plan: ReplayPlan) -> ReplayPosition:
        stored = self._read(POSITION)
        if stored is None:
            return ReplayPosition(1, plan.starts, plan.starts)
        try:
            at, to = _offsets(stored["at"]), _offsets(stored["to"])
            return ReplayPosition(stored["number"], at, to, stored["rows"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Damaged(
                f"{self._folder / POSITION} is damaged; use another --checkpoint"
            ) from None

    def next(self, position: ReplayPosition, ends: Ends, max_rows: int) -> ReplayPosition:
        """Store and return the next part: at most `max_rows` rows up to `ends`."""
        at = {shard: position.at.get(shard, 0) for shard in ends} | position.at
        whole = replace(position, at=at, to={**at, **ends})
        to = dict(at)
        for admitted in limit_rows(whole.ranges(), max_rows):
            to[admitted.shard] = admitted.end
        part = replace(whole, to=to)
        self._write(POSITION, asdict(part))
        return part

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self._folder / name
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Damaged(f"{path} cannot be read: {error}; use another --checkpoint") from None
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise Damaged(
                f"{path} was written by another version of polybus; use another --checkpoint"
            )
        return content

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        with explain_write_errors(self._folder):
            write_durably(self._folder / name, json.dumps(content))


def _offsets(given: Mapping[str, int]) -> Ends:
    return {int(shard): int(offset) for shard, offset in given.items()}


def _shown(value: object) -> str:
    return "not given" if value is None or value == [] else repr(value)
