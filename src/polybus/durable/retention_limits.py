"""The retention settings of a topic: which messages its log keeps.

A message is due when any limit no longer keeps it. Retention (`retention.py`) trims due messages
that every reader has acked, with `retain_unread = "drop"` all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import MalformedRequest, UsageError

if TYPE_CHECKING:
    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store

AGE_MS, BYTES, MESSAGES = "retain_age_ms", "retain_bytes", "retain_messages"
UNREAD, KEEP_UNREAD, DROP_UNREAD = "retain_unread", "keep", "drop"
UNREAD_VALUES: Final = (KEEP_UNREAD, DROP_UNREAD)
LIMITS: Final = (AGE_MS, BYTES, MESSAGES)
SETTINGS: Final = frozenset((*LIMITS, UNREAD))
MAX_LIMIT: Final = 2**53  # exact in the JSON of every language

NO_LIMIT: Final = "none"

NS_PER_MS: Final = 1_000_000
# Blocks that one search by size looks at: about a millisecond of work for the interpreter.
MAX_BLOCKS: Final = 128


def parse_limit(text: str, parse: Callable[[str], int]) -> int | None:
    """Return the value of a limit as people write it, None for `none`. Raises `UsageError`."""
    if text == NO_LIMIT:
        return None
    value = parse(text)
    if not 1 <= value <= MAX_LIMIT:
        raise UsageError(f"limit must be from 1 to {MAX_LIMIT}, or {NO_LIMIT}, got {text!r}")
    return value


class DueMessages(NamedTuple):
    """The first offset that all limits keep, by shard with due messages.

    `has_more` if the search has stopped at its limit.
    """

    before: dict[int, int]
    has_more: bool


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """The limits of a topic. None is no limit."""

    age_ms: int | None = None
    bytes: int | None = None
    messages: int | None = None
    unread: str = KEEP_UNREAD

    @classmethod
    def of(cls, topic: Topic) -> RetentionLimits:
        settings = topic.settings
        limits = (settings.get(name) for name in LIMITS)
        age_ms, size, messages = (limit if isinstance(limit, int) else None for limit in limits)
        unread = DROP_UNREAD if settings.get(UNREAD) == DROP_UNREAD else KEEP_UNREAD
        return cls(age_ms, size, messages, unread)

    def __bool__(self) -> bool:
        """Return True if there is a limit."""
        return any(limit is not None for limit in (self.age_ms, self.bytes, self.messages))

    @property
    def depends_on_new_messages(self) -> bool:
        """Return True if a new message may make an older one due."""
        return self.bytes is not None or self.messages is not None

    def find_due(self, store: Store, topic: Topic, bounds: Bounds, now_ns: int) -> DueMessages:
        """Return the messages that a limit does not keep.

        By age and by number it is exact. By size it ends with a block, and a large excess takes
        several searches.
        """
        number, has_more = topic.number, False
        oldest_ns = 0  # an age may be longer than the time since 1970
        if self.age_ms is not None:
            oldest_ns = max(0, now_ns - self.age_ms * NS_PER_MS)
        due = {}
        for shard, (start, end, _) in enumerate(bounds.shards):
            cut = start
            if self.age_ms is not None and cut < end:
                cut = max(cut, store.find(number, shard, oldest_ns))
            if self.messages is not None and cut < end:
                # Ids have no gaps, so the newest messages are those with the highest ids.
                cut = max(cut, store.find_id(number, shard, bounds.next_id - self.messages))
            due[shard] = cut
        if self.bytes is not None:
            excess, has_more = store.find_excess(number, self.bytes, MAX_BLOCKS)
            for shard, cut in excess.items():
                due[shard] = max(due[shard], cut)
        starts = [shard.start for shard in bounds.shards]
        due = {shard: cut for shard, cut in due.items() if cut > starts[shard]}
        return DueMessages(due, has_more)


def check_retention_settings(settings: Mapping[str, object]) -> None:
    """Raise `MalformedRequest` if a retention setting has an invalid value; None removes one."""
    for name in LIMITS:
        value = settings.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= MAX_LIMIT):
            raise MalformedRequest(f"{name} must be an integer from 1 to {MAX_LIMIT}, or null")
    if settings.get(UNREAD) not in (None, *UNREAD_VALUES):
        raise MalformedRequest(f"{UNREAD} must be one of {', '.join(UNREAD_VALUES)}")
