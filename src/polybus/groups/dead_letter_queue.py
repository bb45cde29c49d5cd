"""Messages that are given up: they go to TOPIC.dlq, in the commit that counts them as acked.

Key, body and headers stay as they were, and further headers say where a message came
from and why it is there. A topic that is such an end itself has none. Where the
letter cannot be written (its topic may not be made, there are too many of them for one
commit), the message is not given up: it comes again. One that was trimmed does not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import InvalidTopic, PolybusError, Trimmed, Unavailable
from polybus.groups.message_block import OutputMessage, block_of, messages_of
from polybus.model.topic_name import MAX_NAME_BYTES

if TYPE_CHECKING:
    from polybus.groups.group_state import GroupContext
    from polybus.model.commit import Append
    from polybus.model.topic import Topic

_log = logging.getLogger("polybus.groups")

SUFFIX: Final = ".dlq"
PREFIX: Final = "polybus."
MAX_REASON_BYTES: Final = 1024  # an exception's text; a whole trace is for the consumer's log
MAX_DEAD_LETTERS: Final = 1024  # of one commit
MAX_BYTES: Final = 64 << 20  # of one commit, but for the last: a block takes four times that


class ExhaustedMessage(NamedTuple):
    """A message that has failed as often as it may."""

    shard: int
    offset: int
    deliveries: int
    reason: str


def has_dead_letter_topic(topic: Topic) -> bool:
    return not topic.name.endswith(SUFFIX)


def check_dead_letter_name(topic: Topic) -> None:
    """`InvalidTopic` if its letters could have no topic: they would be tried again for ever."""
    most = MAX_NAME_BYTES - len(SUFFIX)
    if has_dead_letter_topic(topic) and len(topic.name.encode()) > most:
        text = f"topic {topic.name!r} leaves no room for {SUFFIX} behind its name: groups read"
        raise InvalidTopic(f"{text} topics with names of at most {most} bytes")


def write_dead_letters(
    means: GroupContext, topic: Topic, group: str, failures: Sequence[ExhaustedMessage]
) -> tuple[tuple[Append, ...], set[tuple[int, int]]]:
    """The appends, and the (shard, offset) of those that are given up by them."""
    messages: dict[tuple[int, int], OutputMessage] = {}
    size = 0
    for failure in failures[:MAX_DEAD_LETTERS]:
        letter = _read_dead_letter(means, topic, group, failure) if size < MAX_BYTES else None
        if letter is not None:
            messages[failure.shard, failure.offset] = letter
            size += len(letter.body)
    if not messages:
        return (), set()
    try:
        target = means.dead_letters(topic)
        return means.durable.build_appends(target, block_of(messages.values())), set(messages)
    except Unavailable:
        raise
    except PolybusError as error:
        _log.warning("nothing can be given up to %s%s: %s", topic.name, SUFFIX, error)
        return (), set()


def _read_dead_letter(
    means: GroupContext, topic: Topic, group: str, failure: ExhaustedMessage
) -> OutputMessage | None:
    start = failure.offset
    try:
        rows = means.durable.store.read(topic.number, failure.shard, start, start + 1, max_rows=1)
    except Trimmed:
        return None
    for number, message in messages_of(rows):
        return message._replace(headers=_headers(message, topic, group, failure, number))
    return None


def _headers(
    message: OutputMessage, topic: Topic, group: str, failure: ExhaustedMessage, number: int
) -> list[tuple[str, bytes]]:
    told: dict[str, object] = {
        "topic": topic.name,
        "shard": failure.shard,
        "offset": failure.offset,
        "id": number,
        "group": group,
        "deliveries": failure.deliveries,
        "reason": _cut(failure.reason),
    }
    ours = [(PREFIX + name, str(value).encode()) for name, value in told.items()]
    names = {name for name, _ in ours}
    return [one for one in message.headers or () if one[0] not in names] + ours


def _cut(reason: str) -> str:
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
