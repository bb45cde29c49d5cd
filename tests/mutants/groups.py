"""Breaks the coordinator of consumer groups on purpose, and demands that its tests notice.

    python tests/mutants/groups.py [part of a mutant's name ...]

The same procedure as in bus.py, with unit tests alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import bus  # noqa: E402
from tests.mutants.bus import mutants  # noqa: E402

SUITES: dict[str, tuple[str, ...]] = {"unit": ("tests/unit/groups",)}

ASSIGNMENT = mutants(
    "groups/assignment.py",
    ("who has least gets more", "(-len(kept[name]), name)", "(len(kept[name]), name)"),
    ("no peer keeps what it has", 'kept.get(owner or "", pool)', "pool"),
    ("holders are not asked", "if holder in kept and", "if False and"),
)

RANGES = mutants(
    "model/offset_ranges.py",
    ("touching ranges stay apart", "start <= merged[-1][1]", "start < merged[-1][1]"),
    ("low mark not raised", "if start > low:", "if start >= low:"),
    ("the end is in", "offset < ranges[index][1]", "offset <= ranges[index][1]"),
)

JUDGING = mutants(
    "groups/shard_progress.py",
    ("any owner", "if progress.owner != consumer or progress.epoch != epoch:", "if False:"),
    ("any epoch", " or progress.epoch != epoch:", ":"),
    ("acks from the future", "if report.last > end:", "if False:"),
    ("ranges without end", "if len(above) > max(most, len(progress.ranges)):", "if False:"),
    ("attempts without end", "if known == 0 and len(attempts) >= MAX_ATTEMPTS:", "if False:"),
    (
        "told again, counted again",
        "count = known if is_repeated else known + 1",
        "count = known + 1",
    ),
    ("one delivery too many", "if count >= max_deliver:", "if count > max_deliver:"),
    (
        "attempts stay",
        "attempts.items() if not offset_ranges.contains(low, above, at)",
        "attempts.items()",
    ),
    (
        "suspicion stays",
        "suspect_to = progress.suspect_to if progress.suspect_to > low else 0",
        "suspect_to = progress.suspect_to",
    ),
    ("no peer is suspect", "suspect_to if suspect_to > progress.low else 0", "0"),
    (
        "the dead ran nothing",
        "return record_failures(released, shard.number, running, max_deliver)",
        "return ReportOutcome(released)",
    ),
    ("the same epoch again", "epoch=progress.epoch + 1)", "epoch=progress.epoch)"),
    (
        "counts of the last owner are lost",
        "emitted=progress.emitted + emitted",
        "emitted=progress.emitted",
    ),
    ("trimmed counts as acked", "start=progress.start + unread,", "start=progress.start,"),
    (
        "letters are not counted",
        "dead_lettered=progress.dead_lettered + len(dead)",
        "dead_lettered=0",
    ),
)

MEMBERSHIP = mutants(
    "groups/membership.py",
    ("members without end", "len(roster.members) >= self._max_members", "False"),
    ("epochs do not rise", "next_epoch=member.epoch + 1", "next_epoch=member.epoch"),
    ("the dead live", "if dead:", "if False:"),
    ("pending work is forgotten", "elif group.needs_rebalance:", "elif False:"),
    ("who leaves is suspect", "if owner == leaving:", "if False:"),
    (
        "no peer is woken",
        "        self._context.wake(group.topic.number)\n\n    def _move",
        "\n    def _move",
    ),
    (
        "replaced, and not fenced",
        "return member is None or member.epoch != shard.progress.member",
        "return member is None",
    ),
    ("a group of no peer stays", "if not group.version:", "if False:"),
    ("what was meant is forgotten", "{**holders, **group.target}", "{**holders}"),
)

STATE = mutants(
    "groups/group_state.py",
    ("a newer one of the name is no matter", "if member.epoch > epoch:", "if False:"),
    (
        "written whatever is there",
        "RecordChange(key, value, shard.version)",
        "RecordChange(key, value, None)",
    ),
    ("removed, and still used", "if self.is_removed:", "if False:"),
    (
        "known before it is on disk",
        "            shard.progress, shard.version = progress, next(versions)\n",
        "            pass\n",
    ),
)

ACKS = mutants(
    "groups/acks.py",
    (
        "done again",
        "if offset_ranges.contains(progress.low, progress.ranges, offset):",
        "if False:",
    ),
    ("late runs count", "if failed != attempt:", "if False:"),
    (
        "outputs are lost",
        "        update.appends += appends\n        return",
        "        return",
    ),
    ("stages are lost", "return update.commit(stages)", "return update.commit()"),
    ("nothing is released", "if report.release:\n        # The", "if False:\n        # The"),
    ("nothing runs", "shard.running = report.running", "pass"),
    ("the next owner inherits", "shard.reset_owner()", "pass"),
    ("counts go back", "max(emitted, report.emitted)", "report.emitted"),
)

FETCHING = mutants(
    "groups/member_fetch.py",
    ("rows of what is to be released", "if n not in release]", "]"),
    ("told again and again", " or not held[n].releasing", ""),
    ("paused is not heeded", "if held.paused:", "if False:"),
    ("what is acked comes again", "at = acked[1]", "pass"),
    (
        "no peer knows what was handed out",
        "shard.handed_to = max(shard.handed_to, last + 1)",
        "pass",
    ),
    (
        "the first shard is always first",
        "shard.read_turn = group.turn",
        "pass",
    ),
    (
        "those without a chance wait on",
        "            if begin == rows.count:\n                break\n",
        "",
    ),
    (
        "trimmed is not counted",
        "                    update.changed[shard] = trimmed",
        "                    pass",
    ),
    ("who follows hears of no change", "known == self._settled:", "self._settled is not None:"),
    ("who follows gets the same again", '._replace(next=place["to"])', ""),
    ("it follows without end", "self._max_rows -= result.rows.count", "pass"),
)

TABLE = mutants(
    "groups/group_registry.py",
    ("groups without end", "if len(self._known) >= self._max_groups:", "if False:"),
    ("no peer is charged", "created >= self._max_user_groups:", "False:"),
    ("epochs begin again", "return int(record.value) if record else 1", "return 1"),
    ("the latest is the earliest", "each.start if start == EARLIEST else each.end", "each.start"),
    (
        "no new deadline",
        "dict.fromkeys(group.roster.members, now)",
        "dict.fromkeys(group.roster.members, 0.0)",
    ),
    ("dropped topics leave records", "self._dropped.append(topic.number)", "pass"),
    ("a sweep that failed is over", "self._dropped += dropped", "pass"),
)

REST = [
    *mutants(
        "groups/group_reset.py",
        ("moved under its members", "if group.roster.members and not force:", "if False:"),
        ("a reset fences no peer", "epoch=progress.epoch + 1,", "epoch=progress.epoch,"),
        ("the count goes on", "                        start=to_offset,\n", ""),
        ("one id too far", '"little") < first:', '"little") <= first:'),
    ),
    *mutants(
        "groups/dead_letter_queue.py",
        ("letters of letters", "return not topic.name.endswith(SUFFIX)", "return True"),
        ("letters without end", "exhausted[:MAX_DEAD_LETTERS]", "exhausted"),
        ("headers are doubled", "if header[0] not in names]", "]"),
    ),
    *mutants(
        "groups/shard_ends.py",
        ("news go back", " and known[shard] < end", ""),
        (
            "news while it looks are lost",
            "            shards = self._store.bounds(topic).shards\n        for",
            "        for",
        ),
    ),
    *mutants(
        "groups/ack_latency.py",
        ("notes without end", "if len(self._offsets) > MAX_SAMPLES:", "if False:"),
    ),
    *mutants(
        "native/port/group_actions.py",
        (
            "produced without a right",
            "        access.check_allowed(caller.identity, PRODUCE, name)\n",
            "",
        ),
        ("no room for letters is no matter", "    check_dead_letter_name(topic)\n", ""),
        ("changes wake no peer", "waits.wake(number, GROUP_CHANGES)", "pass"),
    ),
]

FETCHES = mutants(
    "native/port/group_actions.py",
    (
        "no bound of a fetch",
        "min(request.max_rows, limits.max_fetch_rows)",
        "request.max_rows",
    ),
    (
        "a right that is gone is no matter",
        "            _get_group_topic(port, caller, request)  # access",
        "            # access",
    ),
    (
        "a change is not the last",
        "            if result.is_change or not (result and",
        "            if not (result and",
    ),
)

ALL = [
    *FETCHES,
    *ASSIGNMENT,
    *RANGES,
    *JUDGING,
    *MEMBERSHIP,
    *STATE,
    *ACKS,
    *FETCHING,
    *TABLE,
    *REST,
]

if __name__ == "__main__":
    bus.SUITES, bus.ALL = SUITES, ALL
    bus.TREE = ROOT / "build" / "mutants-groups"
    bus.PACKAGE = bus.TREE / "src" / "polybus"
    sys.exit(bus.main())
