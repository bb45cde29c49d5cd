"""Retention: trims messages that the limits of their topic no longer keep.

A message goes when a limit says so and every reader has acked it. Readers are consumer groups and
stored subscribers (pirate); their positions are read from the store, so they are never ahead of
the positions after a crash. With `retain_unread = "drop"` the limits alone decide. Messages that
are trimmed before a reader has acked them are counted, and raise the alarm `retention_unread`.

One thread works in rounds, and in each round topic by topic. A trim moves the start of shards,
which costs one small commit; the store removes the messages in small steps of its own. No step
needs the event loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polybus.durable.retention_limits import DROP_UNREAD, NS_PER_MS, RetentionLimits
from polybus.errors import Damaged, DoesNotExist, PolybusError, StoreClosed
from polybus.model import offset_ranges

if TYPE_CHECKING:
    from polybus.bus.alarms import Alarms
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.offset_ranges import Ranges
    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store

_log = logging.getLogger("polybus.retention")

# Between two rounds, and longer if the last one took long: rounds take at most SHARE of the time
# of a thread. A changed limit is in force after one round.
ROUND_S: Final = 1.0
SHARE: Final = 0.1
MAX_ROUND_S: Final = 20.0
# Between two trims of a topic that has more to trim: other commits come first.
STEP_S: Final = 0.05
# The alarm stays this long after the last unread message was trimmed, so that a monitor sees it.
ALARM_S: Final = 60.0
UNREAD_ALARM: Final = "retention_unread"
MAX_NAMED: Final = 10  # readers in the text of an alarm


class ReaderPosition(NamedTuple):
    """The position of a group or subscriber: by shard the first unread offset, and acked ranges."""

    reader: str
    shards: Mapping[int, tuple[int, Ranges]]

    def count_unread(self, shard: int, start: int, end: int) -> int:
        """Return how many messages of a range the reader has not acked."""
        low, ranges = self.shards[shard]
        below_end = offset_ranges.count_unacked(low, ranges, end)
        return below_end - offset_ranges.count_unacked(low, ranges, start)


class NothingDue(NamedTuple):
    """A topic of which no message was due, and when one may be.

    `next_id` is None if new messages do not matter.
    """

    topic: Topic
    next_id: int | None
    until_ns: float


# Returns the position of every reader of a topic, in all its shards. May block.
ReadPositions = Callable[["Store", "Topic", "Bounds"], Sequence[ReaderPosition]]


class Retention:
    """The thread that trims topics, until `close`."""

    def __init__(
        self,
        durable: DurableTopics,
        read_positions: ReadPositions,
        alarms: Alarms,
        on_unread: Callable[[int], None],
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        """`on_unread` gets the number of messages that were trimmed before a reader acked them."""
        self._durable = durable
        self._read_positions = read_positions
        self._alarms = alarms
        self._on_unread = on_unread
        self._clock = clock
        self._wall_ns = wall_ns
        self._alarm_ends_s: dict[str, float] = {}  # by topic name
        self._failed: set[int] = set()  # topics whose error is logged
        # By number. Most topics have nothing due for hours, and asking the store takes a search in
        # each shard.
        self._nothing_due: dict[int, NothingDue] = {}
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="polybus-retention", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait until the current trim is done."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def run_round(self) -> bool:
        """Trim each topic once. Returns True if a topic may have more to trim."""
        has_more = False
        topics = self._durable.limited_topics()
        known, self._nothing_due = self._nothing_due, {}  # forgets topics that were dropped
        for topic in topics:
            if self._stopped.is_set():
                break
            nothing_due = known.get(topic.number)
            if nothing_due is not None and self._holds(nothing_due, topic):
                self._nothing_due[topic.number] = nothing_due
            elif not self._durable.is_damaged(topic):
                has_more |= self._try_trim(topic)
        for name in [name for name, end_s in self._alarm_ends_s.items() if end_s <= self._clock()]:
            del self._alarm_ends_s[name]
            self._alarms.clear_alarm(UNREAD_ALARM, name)
        return has_more

    def _run(self) -> None:
        wait_s = ROUND_S
        while not self._stopped.wait(wait_s):
            began_s, least_s = self._clock(), ROUND_S
            try:
                least_s = STEP_S if self.run_round() else ROUND_S
            except StoreClosed:
                return
            except Exception:
                _log.exception("a round of retention failed; retrying")
            took_s = self._clock() - began_s
            wait_s = min(max(least_s, took_s / SHARE), MAX_ROUND_S)

    def _holds(self, nothing_due: NothingDue, topic: Topic) -> bool:
        """Return True if still no message of the topic can be due."""
        return (
            nothing_due.topic is topic  # else its settings have changed
            and nothing_due.next_id in (None, self._durable.next_id(topic))
            and self._wall_ns() < nothing_due.until_ns
        )

    def _note_nothing_due(self, topic: Topic, limits: RetentionLimits, bounds: Bounds) -> None:
        until_ns = math.inf
        if limits.age_ms is not None:
            oldest_ns = _oldest_timestamp_ns(self._durable.store, topic, bounds)
            now_ns = self._wall_ns()  # of an empty topic the next message is the oldest
            until_ns = min(now_ns, oldest_ns or now_ns) + limits.age_ms * NS_PER_MS
        next_id = bounds.next_id if limits.depends_on_new_messages else None
        self._nothing_due[topic.number] = NothingDue(topic, next_id, until_ns)

    def _try_trim(self, topic: Topic) -> bool:
        try:
            has_more = self._trim(topic)
        except StoreClosed:
            raise
        except DoesNotExist:  # dropped meanwhile
            self._failed.discard(topic.number)
            return False
        except PolybusError as error:  # one topic must not stop the others
            if topic.number not in self._failed:
                _log.warning("retention of topic %s failed: %s", topic.name, error)
                self._failed.add(topic.number)
            return False
        self._failed.discard(topic.number)
        return has_more

    def _trim(self, topic: Topic) -> bool:
        """Trim a topic. Returns True if it may have more to trim."""
        store, limits = self._durable.store, RetentionLimits.of(topic)
        # A group that is created or moved back between the decision and the trim would lose
        # messages that it has not acked.
        with self._durable.trim_lock:
            bounds = store.bounds(topic.number)
            due, has_more = limits.find_due(store, topic, bounds, self._wall_ns())
            positions = self._read_positions(store, topic, bounds) if due else ()
            drops_unread = limits.unread == DROP_UNREAD
            cuts = due if drops_unread else hold_back(due, positions, bounds)
            if cuts:
                store.trim(topic.number, cuts)
        if not due and not has_more:
            self._note_nothing_due(topic, limits, bounds)
        if drops_unread:
            self._report_unread(topic, count_unread(cuts, positions, bounds))
        # A reader that holds back all due messages holds back the rest, too.
        return has_more and (bool(cuts) or not due)

    def _report_unread(self, topic: Topic, unread: Mapping[str, int]) -> None:
        if not unread:
            return
        self._on_unread(sum(unread.values()))
        readers = [f"{count} of {reader}" for reader, count in unread.items()]
        if len(readers) > MAX_NAMED:
            readers[MAX_NAMED:] = [f"and {len(readers) - MAX_NAMED} other readers"]
        text = f"retention has trimmed unread messages of {topic.name}: {', '.join(readers)}"
        self._alarms.raise_alarm(UNREAD_ALARM, topic.name, text)
        self._alarm_ends_s[topic.name] = self._clock() + ALARM_S


def hold_back(
    due: Mapping[int, int], positions: Sequence[ReaderPosition], bounds: Bounds
) -> dict[int, int]:
    """Return the offsets to trim at: not beyond the first unread message of any reader."""
    cuts = {
        shard: min([cut, *(position.shards[shard][0] for position in positions)])
        for shard, cut in due.items()
    }
    return {shard: cut for shard, cut in cuts.items() if cut > bounds.shards[shard].start}


def count_unread(
    cuts: Mapping[int, int], positions: Sequence[ReaderPosition], bounds: Bounds
) -> dict[str, int]:
    """Return by reader how many messages before the cuts it has not acked; not those with 0."""
    counts = {
        position.reader: sum(
            position.count_unread(shard, bounds.shards[shard].start, cut)
            for shard, cut in cuts.items()
        )
        for position in positions
    }
    return {reader: count for reader, count in counts.items() if count}


def describe_retention(
    store: Store, topic: Topic, bounds: Bounds, read_positions: ReadPositions, now_ns: int
) -> dict[str, Any]:
    """Return which messages a topic keeps and why, as `topic.info` answers it."""
    limits = RetentionLimits.of(topic)
    due = limits.find_due(store, topic, bounds, now_ns).before if limits else {}
    positions = read_positions(store, topic, bounds) if due else ()
    held = count_unread(due, positions, bounds)
    return {
        "age_ms": limits.age_ms,
        "bytes": limits.bytes,
        "messages": limits.messages,
        "unread": limits.unread,
        "stored_messages": sum(shard.end - shard.start for shard in bounds.shards),
        "stored_bytes": sum(shard.size_bytes for shard in bounds.shards),
        "oldest_timestamp_ns": _oldest_timestamp_ns(store, topic, bounds),
        # Messages beyond the limits, and the readers that have not acked them.
        "due": sum(cut - bounds.shards[shard].start for shard, cut in due.items()),
        "held_by": [{"reader": reader, "messages": count} for reader, count in held.items()],
        # The first offset that the limits keep, by shard; absent: they keep all of the shard.
        "due_before": {str(shard): cut for shard, cut in due.items()},
    }


def _oldest_timestamp_ns(store: Store, topic: Topic, bounds: Bounds) -> int | None:
    """Return the commit time of the oldest stored message, None if there is none."""
    times = []
    for shard, (start, end, _) in enumerate(bounds.shards):
        if start < end:
            try:
                rows = store.read(topic.number, shard, start, start + 1, max_rows=1, max_bytes=1)
            except (DoesNotExist, Damaged):  # trimmed meanwhile, or its damage has an alarm
                continue
            times.append(int.from_bytes(rows.timestamps_ns[:8], "little"))
    return min(times, default=None)
