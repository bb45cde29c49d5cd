"""Dead letters: messages that failed too often move to TOPIC.dlq, in the commit that acks them.

Key, body and headers are unchanged. Additional headers name the origin of the message and the
reason. A topic that is a dead letter queue itself has none. If the dead letter cannot be
written (its topic belongs to another user, cannot be created or is full, or the commit has too
many of them), the message is not acked and is delivered again, unless it was trimmed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final

from polybus.errors import InvalidTopic, PolybusError, StoreClosed, Trimmed, Unavailable
from polybus.groups import shard_progress
from polybus.groups.group_state import Group, GroupContext, GroupUpdate
from polybus.groups.message_block import OutputMessage, build_block, read_messages
from polybus.groups.shard_progress import ExhaustedMessage
from polybus.model.message_ttl import TTL_HEADER
from polybus.model.topic import Topic
from polybus.model.topic_name import DEAD_LETTER_SUFFIX as SUFFIX
from polybus.model.topic_name import MAX_NAME_BYTES

if TYPE_CHECKING:
    from polybus.bus.alarms import Alarms
    from polybus.durable.topic_registry import DurableTopics

ALARM: Final = "dead_letters_blocked"
RECHECK_S: Final = 1.0  # how often a blocked dead letter topic is tried again
PREFIX: Final = "polybus."
MAX_REASON_BYTES: Final = 1024  # the text of an exception; tracebacks are in the consumer's log
MAX_DEAD_LETTERS: Final = 1024  # per commit
MAX_BYTES: Final = 64 << 20  # per commit, except for the last; a block may have four times that


class DeadLetterTargets:
    """The dead letter topics of all groups, and an alarm for each one that cannot be written.

    `open_topic` returns the dead letter topic of a topic, or raises why there is none. Any
    thread may call the methods.
    """

    def __init__(
        self,
        open_topic: Callable[[Topic], Topic],
        alarms: Alarms,
        clock: Callable[[], float],
    ) -> None:
        self._open_topic = open_topic
        self._alarms = alarms
        self._clock = clock
        self._lock = Lock()
        self._unopened: dict[int, Topic] = {}  # topics whose target could not be opened
        self._next_check_s = 0.0

    def open(self, source: Topic) -> Topic:
        """Return the dead letter topic of `source`. Raises why it must not be written."""
        try:
            return self._open_topic(source)
        except Unavailable:
            raise
        except PolybusError:
            with self._lock:
                self._unopened[source.number] = source
            raise

    def block(self, source: Topic, error: PolybusError) -> None:
        """Raise the alarm: dead letters of `source` cannot be written."""
        target = source.name + SUFFIX
        text = f"dead letters of {source.name} cannot be written to {target}: {error}"
        self._alarms.raise_alarm(ALARM, source.name, text)

    def clear(self, source: Topic) -> None:
        """Clear the alarm: dead letters of `source` can be written, or it was dropped."""
        with self._lock:
            self._unopened.pop(source.number, None)
        self._alarms.clear_alarm(ALARM, source.name)

    def recheck(self, durable: DurableTopics) -> None:
        """Try to open the blocked targets again; a message's next run may be far away."""
        now_s = self._clock()
        if not self._unopened or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + RECHECK_S
        with self._lock:
            sources = list(self._unopened.values())
        for source in sources:
            try:
                if durable.find_by_number(source.number) is not None:
                    self._open_topic(source)
            except StoreClosed:
                raise
            except PolybusError:
                continue
            self.clear(source)


def has_dead_letter_topic(topic: Topic) -> bool:
    return not topic.name.endswith(SUFFIX)


def check_dead_letter_name(topic: Topic) -> None:
    """Raise `InvalidTopic` if the topic's name is too long for its dead letter queue.

    Without one, messages that always fail would be retried forever.
    """
    most = MAX_NAME_BYTES - len(SUFFIX)
    if has_dead_letter_topic(topic) and len(topic.name.encode()) > most:
        raise InvalidTopic(
            f"topic {topic.name!r} must leave room for {SUFFIX}: a topic with consumer groups has"
            f" a name of at most {most} bytes"
        )


def append_dead_letters(
    context: GroupContext, update: GroupUpdate, exhausted: Sequence[ExhaustedMessage]
) -> set[tuple[int, int]]:
    """Add dead letters and their acks to the update. Returns their (shard, offset) pairs."""
    topic = update.group.topic
    if not has_dead_letter_topic(topic):
        return set()
    letters: dict[tuple[int, int], OutputMessage] = {}
    size = 0
    for message in exhausted[:MAX_DEAD_LETTERS]:
        if size >= MAX_BYTES:
            break
        letter = _read_dead_letter(context, update.group, message)
        if letter is not None:
            letters[message.shard, message.offset] = letter
            size += len(letter.body)
    if not letters:
        return set()
    targets = context.dead_letters
    try:
        appends = context.durable.build_appends(targets.open(topic), build_block(letters.values()))
    except Unavailable:
        raise
    except PolybusError as error:
        targets.block(topic, error)
        return set()
    targets.clear(topic)
    update.appends += appends
    for shard in update.shards:
        gone = [offset for number, offset in letters if number == shard.number]
        if gone:
            progress = update.progress(shard)
            update.changed[shard] = shard_progress.mark_dead_lettered(progress, gone)
    return set(letters)


def _read_dead_letter(
    context: GroupContext, group: Group, exhausted: ExhaustedMessage
) -> OutputMessage | None:
    """Read the message and add the headers. Returns None if it was trimmed."""
    topic, start = group.topic, exhausted.offset
    try:
        rows = context.durable.store.read(
            topic.number, exhausted.shard, start, start + 1, max_rows=1
        )
    except Trimmed:
        return None
    for message_id, message in read_messages(rows):
        fields: dict[str, object] = {
            "topic": topic.name,
            "shard": exhausted.shard,
            "offset": exhausted.offset,
            "id": message_id,
            "group": group.name,
            "deliveries": exhausted.deliveries,
            "reason": _escape_reason(exhausted.reason),
        }
        added = [(PREFIX + name, str(value).encode()) for name, value in fields.items()]
        # A requeued message has these headers from its last time: replace them.
        names = {name for name, _ in added} | {TTL_HEADER}  # a dead letter does not expire
        kept = [header for header in message.headers or () if header[0] not in names]
        return message._replace(headers=kept + added)
    return None


def _escape_reason(reason: str) -> str:
    """Return the reason in printable characters, of at most MAX_REASON_BYTES.

    A consumer chooses it, and people read it in terminals and pages.
    """
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in reason[:MAX_REASON_BYTES]
    )
    return shown.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
