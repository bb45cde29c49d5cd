"""The state of a pirate client, its events, and notices about it.

The state is the result of its events, in order; the journal stores the events
(client_journal.py). `JournalState.apply` is the whole transition table. It uses no clock and no
disk, so reading a journal always gives the same state.

    IdAssigned        the client's id: the first event, once
    EpochOpened       HELLO was answered: an epoch, and the highest counter stored by the bus. If
                      the bus returns an old epoch or has lost a stored counter, it was restored
                      from a backup or is another bus: every LAST is in doubt
    RequestRecorded   PUT, SUB or UNSUB with its counter. It may now be sent and must be settled
    RequestAnswered   its answer, a value or the code of a refusal; it is settled
    RequestForgotten  it is settled without an answer
    MessageRead       a message was read: LAST rises
    PositionsDoubted  the bus was found to be restored by other means: every LAST is in doubt
    PositionsTrusted  each topic in doubt is read from the bus's position
    StateSnapshot     the whole state in one event: the first of a rewritten journal

`counter` is the highest used counter, `known` the highest that the bus has confirmed as stored.
`lasts` has the subscriptions in this folder; the bus decides which subscriptions exist.

Notices are not errors: the client continues, and the notice says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from polybus.dialects.pirate import client_id

SUB: Final = "SUB"
UNSUB: Final = "UNSUB"
PUT: Final = "PUT"
# The error of an outcome without an answer of the bus.
FORGOTTEN: Final = "FORGOTTEN"


class Pending(NamedTuple):
    """A counted request with an unknown outcome."""

    counter: int
    op: str
    topic: str
    body: bytes = b""


class Outcome(NamedTuple):
    """The outcome of the last counted request.

    `value` is LAST for SUB, 0 or 1 for UNSUB, and the message id for PUT. It is None if the
    request was refused (`error` is the code) or forgotten (`FORGOTTEN`).
    """

    counter: int
    op: str
    topic: str
    value: int | None
    error: str = ""


class IdAssigned(NamedTuple):
    id: bytes


class EpochOpened(NamedTuple):
    epoch: int
    highest: int


class RequestRecorded(NamedTuple):
    counter: int
    op: str
    topic: str
    body: bytes


class RequestAnswered(NamedTuple):
    counter: int
    value: int | None
    error: str
    stored: bool  # the counter is used up at the bus


class RequestForgotten(NamedTuple):
    counter: int


class MessageRead(NamedTuple):
    topic: str
    last: int


class PositionsDoubted(NamedTuple):
    pass


class PositionsTrusted(NamedTuple):
    pass


class StateSnapshot(NamedTuple):
    id: bytes
    epoch: int
    counter: int
    known: int
    lasts: dict[str, int]
    doubted: list[str]
    pending: Sequence[object] | None
    outcome: Sequence[object] | None


Event = (
    IdAssigned
    | EpochOpened
    | RequestRecorded
    | RequestAnswered
    | RequestForgotten
    | MessageRead
    | PositionsDoubted
    | PositionsTrusted
    | StateSnapshot
)


@dataclass(slots=True)
class JournalState:
    id: bytes = b""
    epoch: int = 0
    counter: int = 0
    known: int = 0
    lasts: dict[str, int] = field(default_factory=dict)
    doubted: set[str] = field(default_factory=set)
    pending: Pending | None = None
    outcome: Outcome | None = None

    def is_restored_bus(self, opened: EpochOpened) -> bool:
        """Return True if the bus knows less than before."""
        return opened.epoch <= self.epoch or opened.highest < self.known

    def is_behind(self, opened: EpochOpened) -> bool:
        """Return True if the bus knows requests that this folder does not."""
        return opened.highest > self.counter

    def snapshot(self) -> StateSnapshot:
        pending = None if self.pending is None else list(self.pending)
        outcome = None if self.outcome is None else list(self.outcome)
        doubted = sorted(self.doubted)
        return StateSnapshot(
            self.id, self.epoch, self.counter, self.known, self.lasts, doubted, pending, outcome
        )

    # --- the transition table

    def apply(self, event: Event) -> None:
        match event:
            case IdAssigned(client_id):
                self.id = client_id
            case EpochOpened():
                self._opened(event)
            case RequestRecorded(counter, op, topic, body):
                self.counter = counter
                self.pending = Pending(counter, op, topic, body)
            case RequestAnswered():
                self._answered(event)
            case RequestForgotten():
                self._settle_pending(None, FORGOTTEN)
            case MessageRead(topic, last):
                self.lasts[topic] = max(last, self.lasts.get(topic, 0))
            case PositionsDoubted():
                self._doubt()
            case PositionsTrusted():
                self.lasts.update(dict.fromkeys(self.doubted, 0))
                self.doubted.clear()
            case StateSnapshot():
                self._load_snapshot(event)

    def _opened(self, event: EpochOpened) -> None:
        if self.is_restored_bus(event):
            # The only way down for `known`: the bus has lost the counters above.
            self._doubt()
            self.known = event.highest
        self.epoch = event.epoch
        self.known = max(self.known, event.highest)
        self.counter = max(self.counter, event.highest)

    def _doubt(self) -> None:
        self.doubted.update(topic for topic, last in self.lasts.items() if last)

    def _answered(self, event: RequestAnswered) -> None:
        assert self.pending is not None
        topic, value = self.pending.topic, event.value
        if self.pending.op == SUB and value is not None:
            self.lasts[topic] = max(value, self.lasts.get(topic, 0))
        if self.pending.op == UNSUB and value is not None:
            self.lasts.pop(topic, None)
            self.doubted.discard(topic)
        if event.stored:
            self.known = max(self.known, event.counter)
        self._settle_pending(value, event.error)

    def _settle_pending(self, value: int | None, error: str) -> None:
        assert self.pending is not None
        counter, op, topic, _ = self.pending
        self.outcome = Outcome(counter, op, topic, value, error)
        self.pending = None

    def _load_snapshot(self, event: StateSnapshot) -> None:
        self.id, self.epoch, self.counter, self.known = event[:4]
        self.lasts, self.doubted = dict(event.lasts), set(event.doubted)
        self.pending = None if event.pending is None else Pending(*event.pending)  # type: ignore[arg-type]
        self.outcome = None if event.outcome is None else Outcome(*event.outcome)  # type: ignore[arg-type]


def opening_notices(state: JournalState, opened: EpochOpened) -> Iterator[str]:
    """Yield notices about the answer of HELLO, before it is applied to the state."""
    name = client_id.format_client_id(state.id)
    continued = f"Counters continue from {opened.highest + 1}, topics from the bus's positions"
    if state.is_behind(opened) and not state.epoch:
        yield (
            f"the bus knows a client {name}, and this state folder is new:"
            f" the old one was lost, or another client has the same id. {continued};"
            " the last read message of a topic may be delivered again"
        )
    elif state.is_behind(opened):
        outdated = ""
        if state.pending is not None:
            request = describe_request(state.pending)
            outdated = f". The stored request, {request}, is outdated; forget it"
        yield (
            f"this state folder is an old copy, or another client has the id {name}:"
            f" it has requests up to counter {state.counter}, the bus up to {opened.highest}."
            f" {continued}{outdated}"
        )
    if state.is_restored_bus(opened):
        yield restored_bus_notice(
            state,
            f"it has epoch {opened.epoch} and counter {opened.highest},"
            f" and had {state.epoch} and {state.known}",
        )


def restored_bus_notice(state: JournalState, how: str) -> str:
    text = (
        f"the bus knows less than this client ({how}): it was restored from a backup, or it is"
        " another bus. Messages that it acknowledged since then are lost, and ids are reused"
    )
    topics = ", ".join(sorted(topic for topic, last in state.lasts.items() if last))
    if topics:
        text += f". Before {topics} can be read: {HOW_TO_CONTINUE}"
    return text


HOW_TO_CONTINUE = (
    "open the client with reread=True (--reread) to read from the bus's positions, where"
    " messages may be delivered again; or unsubscribe and subscribe to read only new messages"
)


def doubt_notice(topic: str) -> str:
    return f"the bus was restored from a backup after {topic!r} was read; {HOW_TO_CONTINUE}"


def describe_request(request: Pending) -> str:
    return f"{request.op} {request.topic!r} (counter {request.counter})"


def unknown_outcome_notice(request: Pending) -> str:
    return (
        f"the outcome of {describe_request(request)} is unknown; it is stored and sent"
        " again before the next request or by resume; forget abandons it"
    )
