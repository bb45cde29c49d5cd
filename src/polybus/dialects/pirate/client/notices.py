"""What a client tells people when the two sides remember differently, and what to do.

Not errors: the client can go on, and says how it does.
"""

from __future__ import annotations

from collections.abc import Iterator

from polybus.dialects.pirate import client_id
from polybus.dialects.pirate.client.journal_state import EpochOpened, JournalState, Pending


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
