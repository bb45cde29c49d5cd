"""PUT: one message, one stamped commit.

Whatever becomes of a put is decided by the store, stamp first: a copy of one that was
done is answered as that was, also if its topic has gone since. Refusals that use the
counter up are commits, too, with nothing but the stamp and the refusal in them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.put_fast_path import Put, ShortPuts, Target
from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    Request,
    SubscriberContext,
    error_from_future,
)
from polybus.durable.topic_registry import MAX_BYTES
from polybus.errors import Denied, DoesNotExist, LimitReached, PolybusError, Stale, UnknownProducer
from polybus.model.access_rule import PRODUCE
from polybus.model.block import Block
from polybus.model.commit import Append, Commit
from polybus.model.stamp import Stamp

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.client_table import ClientEntry, ClientTable
    from polybus.dialects.pirate.server.subscribe_handler import SubscribeHandler
    from polybus.durable.publisher import CallOnLoop
    from polybus.model.commit import CommitResult
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic

PUT: Final = b"PUT"
NS_PER_MS: Final = 1_000_000
DIGEST_BYTES: Final = 16
JOINED_BYTES: Final = 4096  # a little more to copy costs less than one more call
# More than this is copied and hashed on a worker: the loop would stand still too long.
LARGE_BYTES: Final = 256 << 10
MAX_KNOWN_TOPICS: Final = 65_536
STALE: Final = "the counter was used before: for another request, or too long ago"


class PutBatch:
    """Some puts that were handed over together, and go on when all of them are on disk.

    The store tells on a thread of its own, and mostly of all of them at once: so the last is
    waited for, and then whoever is still missing.
    """

    __slots__ = ("futures", "on_done", "puts", "soon")

    def __init__(
        self,
        puts: list[Put],
        futures: list[Future[CommitResult]],
        soon: CallOnLoop,
        land: Callable[[PutBatch], None],
    ) -> None:
        self.puts = puts
        self.futures = futures
        self.soon = soon
        self.on_done = land
        futures[-1].add_done_callback(self._on_commit)

    def _on_commit(self, _future: Future[CommitResult]) -> None:
        self.soon(self._check_done)

    def _check_done(self) -> None:
        for future in self.futures:
            if not future.done():
                future.add_done_callback(self._on_commit)
                return
        self.on_done(self)


class ReservedBytes:
    """Bytes that wait for their turn: counted until it comes, or will not come."""

    __slots__ = ("_putting", "_size", "then")

    def __init__(self, putting: PutHandler, size: int, then: OnResult) -> None:
        self._putting = putting
        self._size = size
        self.then = then
        putting.fast_path.uncommitted_bytes += size

    def release(self) -> None:
        self._putting.fast_path.uncommitted_bytes -= self._size
        self._size = 0

    def finish(self, came: Any) -> None:
        self.release()
        self.then(came)


class PutHandler:
    def __init__(
        self, means: SubscriberContext, clients: ClientTable, topics: SubscribeHandler
    ) -> None:
        self._means = means
        self._durable = means.durable
        self._clients = clients
        self._topics = topics
        self._max_bytes = means.limits.max_uncommitted_bytes
        self.fast_path = ShortPuts(
            clients.find,
            (Block, Append, Commit, Stamp),
            self._is_open,
            means.wall_ns,
            LARGE_BYTES,
            self._max_bytes,
            MAX_KNOWN_TOPICS,
        )

    @property
    def uncommitted_bytes(self) -> int:
        return self.fast_path.uncommitted_bytes

    def put(self, client: ClientEntry, request: Request, caller: Identity, then: OnResult) -> None:
        """A small one, which goes beside others."""
        if client.is_fenced(request):
            then(client.fenced_error(request))
            return
        body = request.body[0] if len(request.body) == 1 else b"".join(request.body)
        self._submit(
            client, request, caller, then, request_digest(request, body), self._block(body)
        )

    def reserve(self, request: Request, then: OnResult) -> ReservedBytes | None:
        """Room for one that has to wait for its turn, so that what waits is bounded, too.

        None if there is none, and that was told.
        """
        size = sum(map(len, request.body))
        return ReservedBytes(self, size, then) if self._has_room(size, then) else None

    def put_held(
        self, client: ClientEntry, request: Request, caller: Identity, held: ReservedBytes
    ) -> None:
        """One that has waited for its turn."""
        held.release()
        self.put(client, request, caller, held.then)

    def put_large(
        self, client: ClientEntry, request: Request, caller: Identity, held: ReservedBytes
    ) -> None:
        """Goes alone while it is made ready, and no longer."""
        if client.is_fenced(request):
            held.finish(client.fenced_error(request))
            self._clients.finish_exclusive(client)
            return

        def ready(future: Future[tuple[bytes, Block]]) -> None:
            held.release()
            error = error_from_future(future)
            if error is None:
                self._submit(client, request, caller, held.then, *future.result())
            else:
                held.then(error)
            self._clients.finish_exclusive(client)

        self._means.workers(lambda: self._prepare_large(request), ready)

    def flush(self) -> None:
        """Hands over what the turn has brought."""
        puts, commits = self.fast_path.hand_over()
        if puts:
            futures = self._durable.store.commit_all(commits)
            PutBatch(puts, futures, self._means.run_on_loop, self._on_batch_committed)

    def _prepare_large(self, request: Request) -> tuple[bytes, Block]:
        body = b"".join(request.body)
        return request_digest(request, body), self._block(body)

    def _block(self, body: bytes) -> Block:
        now_ms = self._means.wall_ns() // NS_PER_MS
        return Block.from_columns(body, array("i", (0, len(body))), insertion_ms=now_ms)

    def _submit(
        self,
        client: ClientEntry,
        request: Request,
        caller: Identity,
        then: OnResult,
        asked: bytes,
        block: Block,
    ) -> None:
        size = len(block.data)
        if not self._has_room(size, then):
            return
        stamp = Stamp(client.producer, request.epoch, request.counter, asked)
        put = Put(client, request.counter, request.topic, then, stamp, block)
        topic = self._durable.find(request.topic)
        refusal = self._refusal(caller, request.topic, topic)
        if topic is None or refusal is not None:
            assert refusal is not None
            commit = Commit(stamp=stamp, note=subscriber_records.encode_refusal(refusal))
        else:
            try:
                commit = Commit(self._appends(topic, block), (), (), stamp, b"")
            except PolybusError as error:  # the topic's own bound
                then(error)
                return
            if topic.settings.get(MAX_BYTES):
                put.bounded = topic
                self._durable.add_in_flight(topic, size)
        self._enqueue(put, commit)

    def _enqueue(self, put: Put, commit: Commit) -> None:
        if not self.fast_path.has_waiting():
            self._means.run_on_loop(self.flush)  # if no turn's end comes before
        self.fast_path.add(put, commit)

    def _appends(self, topic: Topic, block: Block) -> tuple[Append, ...]:
        """What nearly all topics of subscribers have, one shard and no bound, is learned."""
        name = topic.name.encode()
        if len(topic.open_shards) == 1 and not topic.settings.get(MAX_BYTES):
            hashed = blake2b(_digest_head(PUT, name), digest_size=DIGEST_BYTES)
            self.fast_path.learn(name, Target(topic, topic.open_shards[0], hashed))
        return self._durable.build_appends(topic, block)

    def _is_open(self, topic: Topic) -> bool:
        """Whether puts to a topic that was learned may go by the short path."""
        if self._means.policy.has_rules_for(PRODUCE) or self._durable.find(topic.name) is not topic:
            return False
        return not self._topics.is_in_removal(topic)

    def _has_room(self, size: int, then: OnResult) -> bool:
        if self.uncommitted_bytes + size <= self._max_bytes:
            return True
        text = f"{self._max_bytes} bytes are on their way to the disk: send it again"
        then(LimitReached("max_uncommitted_bytes", text))
        return False

    def _refusal(self, caller: Identity, name: str, topic: Topic | None) -> PolybusError | None:
        if self._means.policy.has_rules_for(PRODUCE):
            try:
                self._means.binding.check_allowed(caller, PRODUCE, name)
            except Denied as error:
                return error
        if topic is None:
            return self._means.binding.missing_topic_error(name)
        if self._topics.is_in_removal(topic):
            return DoesNotExist(f"there is no topic {name!r}: its last subscriber has left")
        return None

    def _on_batch_committed(self, flight: PutBatch) -> None:
        came, reached = self.fast_path.outcomes(flight.futures, error_from_future)
        self._durable.advance_all(reached)  # before anybody is told
        self.fast_path.land(flight.puts, came, self._on_put_committed, self._clients.run_queued)

    def _on_put_committed(self, put: Put, came: CommitResult | PolybusError) -> None:
        size = len(put.block.data)
        self.fast_path.uncommitted_bytes -= size
        if put.bounded is not None:
            self._durable.add_in_flight(put.bounded, -size)
            put.bounded = None
        if not isinstance(came, PolybusError):
            put.then(subscriber_records.decode_outcome(came))
            self._clients.finish_shared(put.client, put.counter)
        elif isinstance(came, DoesNotExist) and not isinstance(came, UnknownProducer):
            # The topic went while the message was on its way: that is the answer, and stored.
            put.client.in_flight -= 1
            refusal = DoesNotExist(f"there is no topic {put.topic!r} any more")
            self._enqueue(
                put, Commit(stamp=put.stamp, note=subscriber_records.encode_refusal(refusal))
            )
        else:
            put.then(Stale(STALE) if isinstance(came, Stale) else came)
            self._clients.finish_shared(put.client, 0)


def request_digest(request: Request, body: bytes = b"") -> bytes:
    """Tells requests apart that use one counter."""
    head = _digest_head(request.op, request.topic.encode())
    if len(body) <= JOINED_BYTES:
        return blake2b(head + body, digest_size=DIGEST_BYTES).digest()
    found = blake2b(head, digest_size=DIGEST_BYTES)
    found.update(body)
    return found.digest()


def _digest_head(op: bytes, topic: bytes) -> bytes:
    return b"%b\0%b\0" % (op, topic)
