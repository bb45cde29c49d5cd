"""Producers belong to whoever opened them first: nobody else can fence them.

Who that was is a record beside the producer, and goes with it. Streams ask for it
with every batch, so it is remembered here until the producer is closed. Anonymous
callers are one: they share their producers. Producers without a name are forgotten
some time after their last use (`sightings`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from polybus.dialects.pirate.server.subscriber_records import PRODUCERS as PIRATES
from polybus.errors import Conflict, Denied, MalformedRequest, UnknownProducer
from polybus.model.commit import Commit, RecordChange
from polybus.model.stamp import KEPT_RESULTS, MAX_KEPT_RESULTS, MAX_PRODUCER_BYTES, ProducerOptions
from polybus.native.port import query_runs
from polybus.native.port.anonymous_producers import AnonymousProducers
from polybus.native.protocol.fields import ActionSchema, Answer, Arguments, Field

if TYPE_CHECKING:
    from polybus.model.identity import Identity
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.store.contract import Store

OWNER = b"owner/"  # + the producer's name: who may use it
ANONYMOUS_PREFIX = "anonymous-"


MAX_REMEMBERED = 65_536  # owners; some 200 bytes each


class ProducerRegistry:
    """Whose a producer is. For all threads."""

    def __init__(
        self, store: Store, clock: Callable[[], float], wall_ns: Callable[[], int]
    ) -> None:
        self._store = store
        self._sightings = AnonymousProducers(store, clock, wall_ns)
        self._known: dict[str, bytes] = {}
        self._closed = 0  # how often one was forgotten
        self._lock = Lock()

    def check(self, caller: Identity, producer: str) -> None:
        """`Denied` if it is another's, `UnknownProducer` if it is nobody's."""
        owner = self._known.get(producer) or self._look_up(producer)
        if owner != caller.name.encode():
            raise Denied(f"producer {producer!r} is {owner.decode()}'s, not {caller.name}'s")
        if producer.startswith(ANONYMOUS_PREFIX):
            self._sightings.record_use(producer)

    def claim(self, caller: Identity, producer: str) -> None:
        """The caller's from now on, unless it is another's: then `Denied`."""
        change = RecordChange(owner_key(producer), caller.name.encode(), expected=0)
        try:
            changes = (change, *self._sightings.use_change(producer))
            self._store.commit(Commit(changes=changes)).result()
        except Conflict:
            self.check(caller, producer)

    def release(self, producer: str) -> None:
        """Nobody's from now on."""
        try:
            changes = (
                RecordChange(owner_key(producer), None),
                *self._sightings.delete_change(producer),
            )
            self._store.commit(Commit(changes=changes)).result()
        finally:
            with self._lock:
                self._closed += 1
                self._known.pop(producer, None)

    def forget_unused(self) -> None:
        """Drops some that have no name and were not used for long.

        Opening one fences whoever should come back just now. Its records go last: if this
        ends in between, it is done again.
        """
        for producer in self._sightings.list_expired():
            opened = self._store.open_producer(producer, ProducerOptions())
            self._store.close_producer(producer, opened.epoch)
            self.release(producer)

    def _look_up(self, producer: str) -> bytes:
        closed = self._closed
        found = self._store.get(owner_key(producer))
        if found is None:
            raise UnknownProducer(f"nobody has opened a producer {producer!r}")
        with self._lock:
            if closed == self._closed:  # else it may have been this one
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                self._known[producer] = found.value
        return found.value


def owner_key(producer: str) -> bytes:
    try:
        raw = producer.encode()
    except UnicodeEncodeError:
        raise MalformedRequest("a producer's name is no text") from None
    if not 1 <= len(raw) <= MAX_PRODUCER_BYTES:
        raise MalformedRequest(f"a producer's name has 1 to {MAX_PRODUCER_BYTES} bytes")
    return OWNER + raw


def _open(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    name = given["producer"] or ANONYMOUS_PREFIX + secrets.token_hex(16)
    if name.startswith(query_runs.PREFIX):
        raise MalformedRequest(f"producers named {query_runs.PREFIX}… are those of stage.publish")
    if name.startswith(PIRATES):
        raise MalformedRequest(f"producers named {PIRATES}… are those of pirate's clients")
    if not 1 <= given["kept_results"] <= MAX_KEPT_RESULTS:
        raise MalformedRequest(f"kept_results is from 1 to {MAX_KEPT_RESULTS}")
    port.owners.forget_unused()
    port.owners.claim(caller.identity, name)
    opened = port.store.open_producer(name, ProducerOptions(given["dense"], given["kept_results"]))
    return {"producer": name, "epoch": opened.epoch, "last_counter": opened.last_counter}


def _close(port: NativePort, caller: Caller, given: Arguments) -> Answer:
    name = given["producer"]
    port.owners.check(caller.identity, name)
    port.store.close_producer(name, given["epoch"])
    port.owners.release(name)
    return {}


ACTIONS = {
    ActionSchema(
        "producer.open",
        "Opens a producer, new or known; stamps of its earlier epochs are refused from now on",
        (
            Field("producer", "text", "its name; without one it is a new, anonymous one", ""),
            Field("dense", "flag", "counters leave no gaps", True),
            Field("kept_results", "count", "how many answers are kept for repeats", KEPT_RESULTS),
        ),
        "producer, epoch, last_counter (0 if none)",
    ): _open,
    ActionSchema(
        "producer.close",
        "Forgets a producer for good",
        (
            Field("producer", "text", "its name"),
            Field("epoch", "count", "the epoch that the caller holds"),
        ),
        "nothing",
    ): _close,
}
