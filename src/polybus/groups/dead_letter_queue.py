"""Dead letters: messages that failed too often move to TOPIC.dlq, in the commit that acks them.

Key, body and headers are unchanged. Additional headers name the origin of the message and the
reason. A topic that is a dead letter queue itself has none. If the dead letter cannot be
written (its topic cannot be created, or the commit has too many of them), the message is not
acked and is delivered again, unless it was trimmed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from polybus.errors import InvalidTopic, PolybusError, Trimmed, Unavailable
from polybus.groups import shard_progress
from polybus.groups.group_state import Group, GroupContext, GroupUpdate
from polybus.groups.message_block import OutputMessage, build_block, read_messages
from polybus.groups.shard_progress import ExhaustedMessage
from polybus.model.topic import Topic
from polybus.model.topic_name import MAX_NAME_BYTES

_log = logging.getLogger("polybus.groups")

SUFFIX: Final = ".dlq"
PREFIX: Final = "polybus."
MAX_REASON_BYTES: Final = 1024  # the text of an exception; tracebacks are in the consumer's log
MAX_DEAD_LETTERS: Final = 1024  # per commit
MAX_BYTES: Final = 64 << 20  # per commit, except for the last; a block may have four times that


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
    try:
        target = context.dead_letters(topic)
        update.appends += context.durable.build_appends(target, build_block(letters.values()))
    except Unavailable:
        raise
    except PolybusError as error:
        _log.warning("cannot write dead letters to %s%s: %s", topic.name, SUFFIX, error)
        return set()
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
        reason = exhausted.reason.encode(errors="replace")[:MAX_REASON_BYTES]
        fields: dict[str, object] = {
            "topic": topic.name,
            "shard": exhausted.shard,
            "offset": exhausted.offset,
            "id": message_id,
            "group": group.name,
            "deliveries": exhausted.deliveries,
            "reason": reason.decode(errors="ignore"),
        }
        added = [(PREFIX + name, str(value).encode()) for name, value in fields.items()]
        # A requeued message has these headers from its last time: replace them.
        names = {name for name, _ in added}
        kept = [header for header in message.headers or () if header[0] not in names]
        return message._replace(headers=kept + added)
    return None
