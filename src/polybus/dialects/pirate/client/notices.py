"""What a client tells people when the two sides remember differently, and what to do.

Not errors: the client can go on, and says how it does.
"""

from __future__ import annotations

from collections.abc import Iterator

from polybus.dialects.pirate import client_id
from polybus.dialects.pirate.client.journal_state import Opened, Pending, State


def on_opening(state: State, opened: Opened) -> Iterator[str]:
    """What is to be said of HELLO's answer, before it becomes part of the state."""
    if state.is_behind(opened):
        yield _old_copy(state, opened) if state.epoch else _lost_folder(state, opened)
    if state.went_back(opened):
        yield went_back(
            state,
            f"it has epoch {opened.epoch} and counter {opened.highest},"
            f" and had {state.epoch} and {state.known}",
        )


def _old_copy(state: State, opened: Opened) -> str:
    text = (
        f"this state folder is an old copy, or another client has the id {_me(state)}: it knows"
        f" requests up to counter {state.counter}, the bus up to {opened.highest}. Counters go on"
        f" from {opened.highest + 1}; how far topics were read the bus knows, too"
    )
    if state.pending is not None:
        text += f". The request kept here, {described(state.pending)}, is of the past: forget it"
    return text


def _lost_folder(state: State, opened: Opened) -> str:
    return (
        f"the bus knows a client {_me(state)}, and this state folder is new: the old one was lost,"
        f" or another client has the same id. Counters go on from {opened.highest + 1}, topics"
        " where they were; the message that was read last of a topic can come again"
    )


def went_back(state: State, how: str) -> str:
    text = (
        f"the bus knows less than this client ({how}): it was restored from a backup, or it is"
        " another bus. What it had acknowledged since is lost there, and ids are given again"
    )
    topics = ", ".join(sorted(topic for topic, last in state.lasts.items() if last))
    if topics:
        text += f". Before {topics} can be read: {TO_GO_ON}"
    return text


TO_GO_ON = (
    "open the client with reread=True (--reread) to read on from where the bus says, so that"
    " messages may come again; or unsubscribe and subscribe, to begin with what is new"
)


def in_doubt(topic: str) -> str:
    return f"the bus was restored from a backup since {topic!r} was read last: {TO_GO_ON}"


def described(request: Pending) -> str:
    return f"{request.op} {request.topic!r} (counter {request.counter})"


def kept(request: Pending) -> str:
    return (
        f"the outcome of {described(request)} is not known: it is kept, and sent again before"
        " the next one, or by resume; forget drops it"
    )


def _me(state: State) -> str:
    return client_id.shown(state.id)
