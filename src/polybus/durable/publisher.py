"""What push dialects publish to durable topics: committed, and waited for.

They get no answers, so what cannot be kept is counted and logged. What one
connection has on its way to the disk is bounded: over that it is not read from
until half of it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from polybus.bus.request_outcome import DOES_NOT_EXIST, NO, OK, Kind, Outcome
from polybus.errors import Denied, DoesNotExist, LimitReached, PolybusError
from polybus.model.block import Block

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Log
    from polybus.bus.connection import Party
    from polybus.bus.counters import Counters
    from polybus.durable.topic_registry import Durable
    from polybus.model.commit import Committed

NS_PER_MS = 1_000_000
# Brings a step to the loop, from any thread.
Soon = Callable[[Callable[[], None]], None]


class Keeping:
    def __init__(
        self,
        durable: Durable,
        counters: Counters,
        max_uncommitted_bytes: int,
        soon: Soon,
        wall_ns: Callable[[], int],
        log: Log,
    ) -> None:
        self._durable = durable
        self._counters = counters
        self._max_bytes = max_uncommitted_bytes
        self._soon = soon
        self._wall_ns = wall_ns
        self._log = log

    def keep(self, party: Party, name: bytes, offsets: Buffer, bodies: bytes, count: int) -> None:
        """Hands a batch to the store, without an answer for whoever sent it."""
        try:
            block = self._block(offsets, bodies)
            future = self._durable.produce(self._durable.get(name.decode()), block)
        except PolybusError as error:
            self._lost(party, name, count, error)
            return
        size = block.size_bytes
        party.uncommitted_bytes += size
        if party.uncommitted_bytes > self._max_bytes and not party.is_committing:
            party.is_committing = True
            party.pipe.pause_reading()
        future.add_done_callback(
            lambda done: self._soon(lambda: self._kept(party, name, size, count, done))
        )

    def produce(
        self,
        name: bytes,
        offsets: Buffer,
        bodies: bytes,
        then: Callable[[Outcome, int], None],
    ) -> None:
        """Hands a batch to the store; `then` is told, on the loop, its outcome and first id."""
        try:
            topic = self._durable.get(name.decode())
            future = self._durable.produce(topic, self._block(offsets, bodies))
        except PolybusError as error:
            outcome = _outcome(error)
            self._soon(lambda: then(outcome, 0))
            return
        future.add_done_callback(lambda done: self._soon(lambda: _tell(done, then)))

    def _block(self, offsets: Buffer, bodies: bytes) -> Block:
        return Block.from_columns(bodies, offsets, insertion_ms=self._wall_ns() // NS_PER_MS)

    def _kept(
        self, party: Party, name: bytes, size: int, count: int, done: Future[Committed]
    ) -> None:
        error = done.exception()
        if error is not None:
            self._lost(party, name, count, error)
        party.uncommitted_bytes -= size
        if party.is_committing and party.uncommitted_bytes <= self._max_bytes // 2:
            party.is_committing = False
            if not party.ended and party.waiting_for is None:
                party.resume()

    def _lost(self, party: Party, name: bytes, count: int, error: BaseException) -> None:
        reason = error.code if isinstance(error, PolybusError) else "internal"
        self._counters.count("dropped", reason, count)
        self._log.warning(
            "not kept",
            dialect=party.dialect,
            peer=party.pipe.peer,
            topic=name.decode("utf-8", "backslashreplace"),
            reason=reason,
            text=str(error),
            messages=count,
        )


def _tell(done: Future[Committed], then: Callable[[Outcome, int], None]) -> None:
    error = done.exception()
    if error is not None:
        then(_outcome(error), 0)
    else:
        then(OK, min(span.first_id for span in done.result().spans))


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, Denied):
        return NO
    if isinstance(error, DoesNotExist):
        return DOES_NOT_EXIST
    if isinstance(error, LimitReached):
        return Outcome(Kind.OVER_QUOTA, error.limit)
    code = error.code if isinstance(error, PolybusError) else "internal"
    return Outcome(Kind.OVER_QUOTA, code)
