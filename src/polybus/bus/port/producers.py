"""Producers belong to whoever opened them first: nobody else can fence them.

Who that was is a record beside the producer, and goes with it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from polybus.bus.port.fields import Action, Answer, Arguments, Field
from polybus.errors import Conflict, Denied, MalformedRequest, UnknownProducer
from polybus.model.commit import Change, Commit
from polybus.model.stamp import KEPT_RESULTS, MAX_KEPT_RESULTS, MAX_PRODUCER_BYTES, Habits

if TYPE_CHECKING:
    from polybus.bus.port.verbs import Caller, Port
    from polybus.model.identity import Identity
    from polybus.store.contract import Store

OWNER = b"owner/"  # + the producer's name: who may use it
ANONYMOUS_PREFIX = "anonymous-"


def owner_key(producer: str) -> bytes:
    return OWNER + producer.encode()


def check_owner(store: Store, caller: Identity, producer: str) -> None:
    found = store.get(owner_key(producer))
    if found is None:
        raise UnknownProducer(f"nobody has opened a producer {producer!r}")
    if found.value != caller.name.encode():
        raise Denied(f"producer {producer!r} is {found.value.decode()}'s, not {caller.name}'s")


def _claim(store: Store, caller: Identity, producer: str) -> None:
    change = Change(owner_key(producer), caller.name.encode(), expected=0)
    try:
        store.commit(Commit(changes=(change,))).result()
    except Conflict:
        check_owner(store, caller, producer)


def _open(port: Port, caller: Caller, given: Arguments) -> Answer:
    name = given["producer"] or ANONYMOUS_PREFIX + secrets.token_hex(16)
    if len(name.encode()) > MAX_PRODUCER_BYTES:
        raise MalformedRequest(f"a producer's name has at most {MAX_PRODUCER_BYTES} bytes")
    if not 1 <= given["kept_results"] <= MAX_KEPT_RESULTS:
        raise MalformedRequest(f"kept_results is from 1 to {MAX_KEPT_RESULTS}")
    store = port.access.durable.store
    _claim(store, caller.identity, name)
    opened = store.open_producer(name, Habits(given["dense"], given["kept_results"]))
    return {"producer": name, "epoch": opened.epoch, "last_counter": opened.last_counter}


def _close(port: Port, caller: Caller, given: Arguments) -> Answer:
    store, name = port.access.durable.store, given["producer"]
    check_owner(store, caller.identity, name)
    store.close_producer(name, given["epoch"])
    store.commit(Commit(changes=(Change(owner_key(name), None),))).result()
    return {}


ACTIONS = {
    Action(
        "producer.open",
        "Opens a producer, new or known; stamps of its earlier epochs are refused from now on",
        (
            Field("producer", "text", "its name; without one it is a new, anonymous one", ""),
            Field("dense", "flag", "counters leave no gaps", True),
            Field("kept_results", "count", "how many answers are kept for repeats", KEPT_RESULTS),
        ),
        "producer, epoch, last_counter (0 if none)",
    ): _open,
    Action(
        "producer.close",
        "Forgets a producer for good",
        (
            Field("producer", "text", "its name"),
            Field("epoch", "count", "the epoch that the caller holds"),
        ),
        "nothing",
    ): _close,
}
