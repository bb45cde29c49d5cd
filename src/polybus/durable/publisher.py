"""Publishing to durable topics from sessions on the loop.

Push dialects get no answers, so messages that cannot be stored are counted and logged. The
submitted, uncommitted bytes of one connection are bounded: over the limit the bus stops
reading from it until half of them are committed.

A batch goes to one shard, because subscribers get messages in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from polybus.bus.request_outcome import DOES_NOT_EXIST, NO, OK, OutcomeKind, RequestOutcome
from polybus.errors import Denied, DoesNotExist, LimitReached, PolybusError
from polybus.model.block import Block

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Logger
    from polybus.bus.connection import Connection
    from polybus.bus.counters import Counters
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.commit import CommitResult

NS_PER_MS = 1_000_000
# Calls a function on the loop; may be used from any thread.
CallOnLoop = Callable[[Callable[[], None]], None]


class DurablePublisher:
    def __init__(
        self,
        durable: DurableTopics,
        counters: Counters,
        max_uncommitted_bytes: int,
        soon: CallOnLoop,
        wall_ns: Callable[[], int],
        log: Logger,
    ) -> None:
        self._durable = durable
        self._counters = counters
        self._max_bytes = max_uncommitted_bytes
        self._soon = soon
        self._wall_ns = wall_ns
        self._log = log

    def publish(
        self, connection: Connection, name: bytes, offsets: Buffer, bodies: bytes, count: int
    ) -> None:
        """Submit a batch. The sender gets no answer; a failure is counted and logged."""
        try:
            block = self._block(offsets, bodies)
            topic = self._durable.get(name.decode())
            future = self._durable.produce(topic, block, in_order=True)
        except PolybusError as error:
            self._count_dropped(connection, name, count, error)
            return
        size = block.size_bytes
        connection.uncommitted_bytes += size
        if connection.uncommitted_bytes > self._max_bytes and not connection.is_committing:
            connection.is_committing = True
            connection.pipe.pause_reading()
        future.add_done_callback(
            lambda done: self._soon(lambda: self._on_committed(connection, name, size, count, done))
        )

    def publish_with_outcome(
        self,
        name: bytes,
        offsets: Buffer,
        bodies: bytes,
        then: Callable[[RequestOutcome, int], None],
    ) -> None:
        """Submit a batch, then call `then` on the loop with its outcome and first id."""
        try:
            topic = self._durable.get(name.decode())
            block = self._block(offsets, bodies)
            future = self._durable.produce(topic, block, in_order=True)
        except PolybusError as error:
            outcome = _outcome_of_error(error)
            self._soon(lambda: then(outcome, 0))
            return

        def report(done: Future[CommitResult]) -> None:
            error = done.exception()
            if error is not None:
                then(_outcome_of_error(error), 0)
            else:
                then(OK, min(span.first_id for span in done.result().spans))

        future.add_done_callback(lambda done: self._soon(lambda: report(done)))

    def _block(self, offsets: Buffer, bodies: bytes) -> Block:
        return Block.from_columns(bodies, offsets, insertion_ms=self._wall_ns() // NS_PER_MS)

    def _on_committed(
        self, connection: Connection, name: bytes, size: int, count: int, done: Future[CommitResult]
    ) -> None:
        error = done.exception()
        if error is not None:
            self._count_dropped(connection, name, count, error)
        connection.uncommitted_bytes -= size
        if connection.is_committing and connection.uncommitted_bytes <= self._max_bytes // 2:
            connection.is_committing = False
            if not connection.is_closed and connection.blocked_by is None:
                connection.on_resume()

    def _count_dropped(
        self, connection: Connection, name: bytes, count: int, error: BaseException
    ) -> None:
        reason = error.code if isinstance(error, PolybusError) else "internal"
        self._counters.count("dropped", reason, count)
        self._log.warning(
            "not kept",
            dialect=connection.dialect,
            peer=connection.pipe.peer,
            topic=name.decode("utf-8", "backslashreplace"),
            reason=reason,
            text=str(error),
            messages=count,
        )


def _outcome_of_error(error: BaseException) -> RequestOutcome:
    if isinstance(error, Denied):
        return NO
    if isinstance(error, DoesNotExist):
        return DOES_NOT_EXIST
    if isinstance(error, LimitReached):
        return RequestOutcome(OutcomeKind.OVER_QUOTA, error.limit)
    code = error.code if isinstance(error, PolybusError) else "internal"
    return RequestOutcome(OutcomeKind.OVER_QUOTA, code)
