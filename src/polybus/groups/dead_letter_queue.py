"""Dead letters: messages that failed too often move to TOPIC.dlq, in the commit that acks them.

Key, body and headers are unchanged. Additional headers name the origin of the message and the
reason. A topic that is a dead letter queue itself has none. If the dead letter cannot be
written (its topic cannot be created, or the commit has too many of them), the message is not
acked and is delivered again, unless it was trimmed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import InvalidTopic, PolybusError, Trimmed, Unavailable
from polybus.groups.message_block import OutputMessage, build_block, read_messages
from polybus.model.topic_name import MAX_NAME_BYTES

if TYPE_CHECKING:
    from polybus.groups.group_state import GroupContext
    from polybus.model.commit import Append
    from polybus.model.topic import Topic

_log = logging.getLogger("polybus.groups")

SUFFIX: Final = ".dlq"
PREFIX: Final = "polybus."
MAX_REASON_BYTES: Final = 1024  # the text of an exception; tracebacks are in the consumer's log
MAX_DEAD_LETTERS: Final = 1024  # per commit
MAX_BYTES: Final = 64 << 20  # per commit, except for the last; a block may have four times that


class ExhaustedMessage(NamedTuple):
    """A message that has failed `max_deliver` times."""

    shard: int
    offset: int
    deliveries: int
    reason: str


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


def write_dead_letters(
    context: GroupContext, topic: Topic, group: str, exhausted: Sequence[ExhaustedMessage]
) -> tuple[tuple[Append, ...], set[tuple[int, int]]]:
    """Return the appends, and the (shard, offset) pairs of the messages in them."""
    letters: dict[tuple[int, int], OutputMessage] = {}
    size = 0
    for message in exhausted[:MAX_DEAD_LETTERS]:
        letter = _read_dead_letter(context, topic, group, message) if size < MAX_BYTES else None
        if letter is not None:
            letters[message.shard, message.offset] = letter
            size += len(letter.body)
    if not letters:
        return (), set()
    try:
        target = context.dead_letters(topic)
        return context.durable.build_appends(target, build_block(letters.values())), set(letters)
    except Unavailable:
        raise
    except PolybusError as error:
        _log.warning("cannot write dead letters to %s%s: %s", topic.name, SUFFIX, error)
        return (), set()


def _read_dead_letter(
    context: GroupContext, topic: Topic, group: str, exhausted: ExhaustedMessage
) -> OutputMessage | None:
    """Read the message and add the headers. Returns None if it was trimmed."""
    start = exhausted.offset
    store = context.durable.store
    try:
        rows = store.read(topic.number, exhausted.shard, start, start + 1, max_rows=1)
    except Trimmed:
        return None
    for message_id, message in read_messages(rows):
        headers = _add_headers(message, topic, group, exhausted, message_id)
        return message._replace(headers=headers)
    return None


def _add_headers(
    message: OutputMessage, topic: Topic, group: str, exhausted: ExhaustedMessage, message_id: int
) -> list[tuple[str, bytes]]:
    fields: dict[str, object] = {
        "topic": topic.name,
        "shard": exhausted.shard,
        "offset": exhausted.offset,
        "id": message_id,
        "group": group,
        "deliveries": exhausted.deliveries,
        "reason": _truncate(exhausted.reason),
    }
    added = [(PREFIX + name, str(value).encode()) for name, value in fields.items()]
    # A requeued message has these headers from its last time: replace them.
    names = {name for name, _ in added}
    return [header for header in message.headers or () if header[0] not in names] + added


def _truncate(reason: str) -> str:
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
