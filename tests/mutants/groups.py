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
    (
        "members with few shards get the extra ones",
        "(-len(kept[name]), name)",
        "(len(kept[name]), name)",
    ),
    ("members keep no shard", 'kept.get(owner or "", pool)', "pool"),
    ("owners are not preferred", "if holder in kept and", "if False and"),
)

RANGES = mutants(
    "model/offset_ranges.py",
    ("adjacent ranges are not merged", "start <= merged[-1][1]", "start < merged[-1][1]"),
    ("low mark is not raised", "if start > low:", "if start >= low:"),
    ("range includes its end", "offset < ranges[index][1]", "offset <= ranges[index][1]"),
)

JUDGING = mutants(
    "groups/shard_progress.py",
    (
        "owner is not checked",
        "if progress.owner != consumer or progress.epoch != epoch:",
        "if False:",
    ),
    ("epoch is not checked", " or progress.epoch != epoch:", ":"),
    ("acks beyond the end", "if report.last > end:", "if False:"),
    ("unlimited ranges", "if len(above) > max(most, len(progress.ranges)):", "if False:"),
    ("unlimited attempts", "if known == 0 and len(attempts) >= MAX_ATTEMPTS:", "if False:"),
    (
        "repeated failure counts twice",
        "count = known if is_repeated else known + 1",
        "count = known + 1",
    ),
    ("one delivery over max_deliver", "if count >= max_deliver:", "if count > max_deliver:"),
    (
        "attempts of acked messages stay",
        "attempts.items() if not offset_ranges.contains(low, above, at)",
        "attempts.items()",
    ),
    (
        "suspect mark is not cleared",
        "suspect_to = progress.suspect_to if progress.suspect_to > low else 0",
        "suspect_to = progress.suspect_to",
    ),
    ("no offset is suspect", "suspect_to if suspect_to > progress.low else 0", "0"),
    (
        "running offsets of a dead member do not fail",
        "return record_failures(released, shard.number, running, max_deliver)",
        "return ReportOutcome(released)",
    ),
    ("assignment keeps its epoch", "epoch=progress.epoch + 1)", "epoch=progress.epoch)"),
    (
        "counts of the last owner are lost",
        "emitted=progress.emitted + emitted",
        "emitted=progress.emitted",
    ),
    ("trimmed counts as acked", "start=progress.start + unread,", "start=progress.start,"),
    (
        "dead letters are not counted",
        "dead_lettered=progress.dead_lettered + len(dead)",
        "dead_lettered=0",
    ),
)

MEMBERSHIP = mutants(
    "groups/membership.py",
    ("unlimited members", "len(roster.members) >= self._max_members", "False"),
    ("epochs do not rise", "next_epoch=member.epoch + 1", "next_epoch=member.epoch"),
    ("dead members do not expire", "if dead:", "if False:"),
    ("needed rebalance is skipped", "elif group.needs_rebalance:", "elif False:"),
    ("leaving member leaves suspect offsets", "if owner == leaving:", "if False:"),
    (
        "rebalance wakes no fetch",
        "        self._context.wake(group.topic.number)\n\n    def _move",
        "\n    def _move",
    ),
    (
        "replaced member keeps its shards",
        "return member is None or member.epoch != shard.progress.member",
        "return member is None",
    ),
    ("group without a member stays", "if not group.version:", "if False:"),
    ("previous target is ignored", "group.target.get(n, owner)", "owner"),
    ("shards that wait keep their owner", "or _is_revoked(group, shard)", ""),
)

STATE = mutants(
    "groups/group_state.py",
    ("old member of the same name is not fenced", "if member.epoch > epoch:", "if False:"),
    (
        "version of a record is not checked",
        "RecordChange(key, value, shard.version)",
        "RecordChange(key, value, None)",
    ),
    ("removed group is used", "if self.is_removed:", "if False:"),
    (
        "drained shards are kept",
        "return not is_drained and self.target",
        "return self.target",
    ),
    ("seals are not noticed", "return end is not None and low >= end", "return False"),
    (
        "committed progress is not applied",
        "            shard.progress, shard.version = progress, next(versions)\n",
        "            pass\n",
    ),
)

PHASES = mutants(
    "groups/shard_phases.py",
    ("new shards do not wait", "if not is_ready:", "if False:"),
    ("trimmed messages are waited for", "max(lows[shard], bounds[shard].start)", "lows[shard]"),
    ("open shards are drained", "is_read and shard < first_open", "is_read"),
    ("parents of the first generation", "        before = shards\n", ""),
)

ACKS = mutants(
    "groups/acks.py",
    (
        "acked transaction is repeated",
        "if offset_ranges.contains(progress.low, progress.ranges, offset):",
        "if False:",
    ),
    ("transaction of an old attempt", "if failed != attempt:", "if False:"),
    (
        "outputs are dropped",
        "        update.appends += appends\n        return",
        "        return",
    ),
    ("stages are dropped", "return update.commit(stages)", "return update.commit()"),
    ("release is ignored", "if report.release:\n        # The", "if False:\n        # The"),
    ("running offsets are ignored", "shard.running = report.running", "pass"),
    ("observations of the last owner stay", "shard.reset_owner()", "pass"),
    ("counts decrease", "max(emitted, report.emitted)", "report.emitted"),
)

FETCHING = mutants(
    "groups/member_fetch.py",
    ("rows of a shard to release", "if n not in release]", "]"),
    ("known release is reported again", " or not held[n].releasing", ""),
    ("pause is ignored", "if held.paused:", "if False:"),
    ("acked rows are delivered", "at = acked[1]", "pass"),
    (
        "handed offsets are not recorded",
        "shard.handed_to = max(shard.handed_to, last + 1)",
        "pass",
    ),
    (
        "shards are not rotated",
        "shard.read_turn = group.turn",
        "pass",
    ),
    (
        "unreached shards lose their place",
        "            if begin == rows.count:\n                break\n",
        "",
    ),
    (
        "trimmed messages are not counted",
        "                    update.changed[shard] = trimmed",
        "                    pass",
    ),
    ("following fetch misses changes", "known == self._settled:", "self._settled is not None:"),
    ("following fetch repeats rows", '._replace(next=place["to"])', ""),
    ("following fetch is unlimited", "self._max_rows -= result.rows.count", "pass"),
)

TABLE = mutants(
    "groups/group_registry.py",
    ("unlimited groups", "        self._shares.take(creator)", "        pass"),
    (
        "epochs restart",
        "return group_records.decode_mark(record.value) if record else 1",
        "return 1",
    ),
    (
        "latest starts at the earliest",
        "each.start if start == EARLIEST else each.end",
        "each.start",
    ),
    (
        "no new deadline",
        "dict.fromkeys(group.roster.members, now)",
        "dict.fromkeys(group.roster.members, 0.0)",
    ),
    ("dropped topics keep their records", "self._dropped.append(topic.number)", "pass"),
    ("failed removal is not repeated", "self._dropped += dropped", "pass"),
)

REST = [
    *mutants(
        "groups/group_reset.py",
        ("reset with members", "if group.roster.members and not force:", "if False:"),
        ("reset keeps the epoch", "epoch=progress.epoch + 1,", "epoch=progress.epoch,"),
        ("reset keeps the start of counts", "                        start=to_offset,\n", ""),
        (
            "reset to an id skips it",
            "find_id(number, shard, value)",
            "find_id(number, shard, value + 1)",
        ),
    ),
    *mutants(
        "groups/dead_letter_queue.py",
        (
            "dead letters of a dead letter queue",
            "return not topic.name.endswith(SUFFIX)",
            "return True",
        ),
        ("unlimited dead letters", "exhausted[:MAX_DEAD_LETTERS]", "exhausted"),
        ("headers are duplicated", "if header[0] not in names]", "]"),
    ),
    *mutants(
        "groups/shard_ends.py",
        ("end of a shard decreases", " and known[shard] < end", ""),
        (
            "end is read once",
            "            shards = self._store.bounds(topic).shards\n        with",
            "        with",
        ),
    ),
    *mutants(
        "groups/ack_latency.py",
        ("unlimited samples", "if len(self._offsets) > MAX_SAMPLES:", "if False:"),
    ),
    *mutants(
        "native/port/group_actions.py",
        (
            "output without a right to produce",
            "        access.check_allowed(caller.identity, PRODUCE, name)\n",
            "",
        ),
        ("name without room for its dead letter queue", "    check_dead_letter_name(topic)\n", ""),
        ("changes wake no fetch", "waits.wake(number, GROUP_CHANGES)", "pass"),
    ),
]

FETCHES = mutants(
    "native/port/group_actions.py",
    (
        "fetch is not limited",
        "min(request.max_rows, limits.max_fetch_rows)",
        "request.max_rows",
    ),
    (
        "revoked right is ignored",
        "            _get_group_topic(port, caller, request)  # access",
        "            # access",
    ),
    (
        "fetch continues after a change",
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
    *PHASES,
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
