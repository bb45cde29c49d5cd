"""What a pirate client knows, and how each event changes it.

State is what the events made of it, in order; the journal keeps the events (journal.py).
`apply` is the whole table, and asks no clock and no disk, so that reading a journal gives
what was there when it was written.

    Named       the client's id: the first event, once
    Opened      HELLO was answered: an epoch, and the highest counter that the bus has stored.
                A bus that gives an epoch we have had, or has forgotten a counter that it had
                stored, went back in time (a backup; another bus): every LAST is in doubt
    Asked       PUT, SUB or UNSUB with its counter: now it may be sent, and must be settled
    Answered    its answer: a value, or the code of a refusal; it is settled
    Forgotten   it is settled without an answer
    Read        a message was read: LAST rises
    Doubted     the bus was found to have gone back by other means: every LAST is in doubt
    Trusted     the bus went back, and each topic in doubt is read from where the bus says
    Everything  all of the above in one event: a journal that was written anew begins with it

`counter` is the highest that was ever used here, `known` the highest that the bus has said
it stored. `lasts` has an entry for each subscription that this folder knows of; the bus is
the one who decides whether there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from polybus.dialects.pirate import client_id

SUB: Final = "SUB"
UNSUB: Final = "UNSUB"
PUT: Final = "PUT"
# What stands in an outcome where no answer of the bus does.
FORGOTTEN: Final = "FORGOTTEN"


class Pending(NamedTuple):
    """A counted request whose outcome is not known."""

    counter: int
    op: str
    topic: str
    body: bytes = b""


class Outcome(NamedTuple):
    """How the last counted request ended.

    `value` is the answer's: LAST for SUB, 0 or 1 for UNSUB, the message's id for PUT; None
    if it was refused, `error` being the code then, or forgotten (`FORGOTTEN`).
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
    stored: bool  # the bus has used the counter up


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
        """Does the bus know less than it did?"""
        return opened.epoch <= self.epoch or opened.highest < self.known

    def is_behind(self, opened: EpochOpened) -> bool:
        """Does the bus know of requests that this folder does not?"""
        return opened.highest > self.counter

    def snapshot(self) -> StateSnapshot:
        pending = None if self.pending is None else list(self.pending)
        outcome = None if self.outcome is None else list(self.outcome)
        doubted = sorted(self.doubted)
        return StateSnapshot(
            self.id, self.epoch, self.counter, self.known, self.lasts, doubted, pending, outcome
        )

    # --- the table

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
    """What is to be said of HELLO's answer, before it becomes part of the state."""
    if state.is_behind(opened):
        yield _old_copy(state, opened) if state.epoch else _lost_folder(state, opened)
    if state.is_restored_bus(opened):
        yield restored_bus_notice(
            state,
            f"it has epoch {opened.epoch} and counter {opened.highest},"
            f" and had {state.epoch} and {state.known}",
        )


def _old_copy(state: JournalState, opened: EpochOpened) -> str:
    text = (
        f"this state folder is an old copy, or another client has the id {_client_name(state)}:"
        f" it knows requests up to counter {state.counter}, the bus up to {opened.highest}."
        f" Counters go on from {opened.highest + 1}; how far topics were read the bus knows, too"
    )
    if state.pending is not None:
        text += (
            f". The request kept here, {describe_request(state.pending)}, is of the past: forget it"
        )
    return text


def _lost_folder(state: JournalState, opened: EpochOpened) -> str:
    return (
        f"the bus knows a client {_client_name(state)}, and this state folder is new:"
        f" the old one was lost, or another client has the same id. Counters go on"
        f" from {opened.highest + 1}, topics where they were;"
        " the message that was read last of a topic can come again"
    )


def restored_bus_notice(state: JournalState, how: str) -> str:
    text = (
        f"the bus knows less than this client ({how}): it was restored from a backup, or it is"
        " another bus. What it had acknowledged since is lost there, and ids are given again"
    )
    topics = ", ".join(sorted(topic for topic, last in state.lasts.items() if last))
    if topics:
        text += f". Before {topics} can be read: {HOW_TO_CONTINUE}"
    return text


HOW_TO_CONTINUE = (
    "open the client with reread=True (--reread) to read on from where the bus says, so that"
    " messages may come again; or unsubscribe and subscribe, to begin with what is new"
)


def doubt_notice(topic: str) -> str:
    return f"the bus was restored from a backup since {topic!r} was read last: {HOW_TO_CONTINUE}"


def describe_request(request: Pending) -> str:
    return f"{request.op} {request.topic!r} (counter {request.counter})"


def unknown_outcome_notice(request: Pending) -> str:
    return (
        f"the outcome of {describe_request(request)} is not known: it is kept, and sent"
        " again before the next one, or by resume; forget drops it"
    )


def _client_name(state: JournalState) -> str:
    return client_id.format_client_id(state.id)
