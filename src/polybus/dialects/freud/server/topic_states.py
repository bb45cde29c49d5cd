"""The states of an ephemeral topic, and what each request does in each of them.

    gone ──create──▶ live ──delete──▶ deleting ──create──▶ recreating
     ▲                │ ▲                │ ▲                   │  │
     │  no readers    │ │ first reader,  │ └──────delete───────┘  │
     └────────────────┘ │ or time is up  │                        │
     ▲                awaiting ◀─────────┼── last old reader gone, buffer not empty, nobody there
     └───────────────────────────────────┘   last old reader gone

    live        takes messages and readers
    awaiting    live, but what was buffered for it waits for its first reader
    deleting    marked: readers read what they have and then the notice
    recreating  marked, and the next incarnation already takes readers and buffers messages
    gone        no such topic

The table is the whole truth about which request means what; `topics.py` carries
it out. A cell names a method of `EphemeralTopics`.
"""

from __future__ import annotations

from enum import Enum


class LifecycleState(Enum):
    GONE = "gone"
    LIVE = "live"
    AWAITING = "awaiting"
    DELETING = "deleting"
    RECREATING = "recreating"


class TopicVerb(Enum):
    CREATE = "create"
    DELETE = "delete"
    SUBSCRIBE = "subscribe"
    PRODUCE = "produce"
    COUNT = "count"
    COLLECT = "collect"  # a push dialect published to the name


class TopicAction(Enum):
    NOTHING = "nothing_happens"
    MISSING = "does_not_exist"
    OPEN = "open_incarnation"
    MARK = "mark_for_deletion"
    JOIN = "add_reader"
    DELIVER = "deliver"
    BUFFER = "hold_back"
    COUNT = "count_readers"
    IGNORE = "ignore"


_A = TopicAction
_COLUMNS = (
    LifecycleState.GONE,
    LifecycleState.LIVE,
    LifecycleState.AWAITING,
    LifecycleState.DELETING,
    LifecycleState.RECREATING,
)
_ROWS = {
    #                gone        live        awaiting    deleting    recreating
    TopicVerb.CREATE: (_A.OPEN, _A.NOTHING, _A.NOTHING, _A.OPEN, _A.NOTHING),
    TopicVerb.DELETE: (_A.NOTHING, _A.MARK, _A.MARK, _A.NOTHING, _A.MARK),
    TopicVerb.SUBSCRIBE: (_A.MISSING, _A.JOIN, _A.JOIN, _A.MISSING, _A.JOIN),
    TopicVerb.PRODUCE: (_A.MISSING, _A.DELIVER, _A.BUFFER, _A.MISSING, _A.BUFFER),
    TopicVerb.COUNT: (_A.MISSING, _A.COUNT, _A.COUNT, _A.COUNT, _A.COUNT),
    TopicVerb.COLLECT: (_A.IGNORE, _A.DELIVER, _A.BUFFER, _A.IGNORE, _A.BUFFER),
}
TABLE: dict[tuple[TopicVerb, LifecycleState], TopicAction] = {
    (verb, state): action
    for verb, row in _ROWS.items()
    for state, action in zip(_COLUMNS, row, strict=True)
}
