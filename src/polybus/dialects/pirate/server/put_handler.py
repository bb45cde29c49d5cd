"""PUT: one message, one stamped commit.

The store decides the result of a PUT, by its stamp first: a copy of a committed PUT gets the
same answer, even if its topic is gone. A refusal that uses up the counter is also a commit,
with only the stamp and the refusal.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.put_fast_path import Put, PutFastPath, Target
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
JOINED_BYTES: Final = 4096  # copying this much costs less than one more call
# Larger bodies are copied and hashed on a worker, because the loop would block too long.
LARGE_BYTES: Final = 256 << 10
MAX_KNOWN_TOPICS: Final = 65_536
STALE: Final = "the counter was already used, for another request or too long ago"


class PutBatch:
    """PUTs that were submitted together, and are answered when all of them are committed.

    The store resolves most futures of a batch at once, on a thread of its own. So the batch
    waits for the last future, and then for any other that is not done.
    """

    __slots__ = ("futures", "on_done", "puts", "soon")

    def __init__(
        self,
        puts: list[Put],
        futures: list[Future[CommitResult]],
        soon: CallOnLoop,
        on_done: Callable[[PutBatch], None],
    ) -> None:
        self.puts = puts
        self.futures = futures
        self.soon = soon
        self.on_done = on_done
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
    """The body of a queued PUT, counted as uncommitted until its turn or its refusal."""

    __slots__ = ("_putting", "_size", "then")

    def __init__(self, putting: PutHandler, size: int, then: OnResult) -> None:
        self._putting = putting
        self._size = size
        self.then = then
        putting.fast_path.uncommitted_bytes += size

    def release(self) -> None:
        self._putting.fast_path.uncommitted_bytes -= self._size
        self._size = 0

    def finish(self, result: Any) -> None:
        self.release()
        self.then(result)


class PutHandler:
    """Executes PUT. The fast path handles most of them (`put_fast_path`)."""

    def __init__(
        self, context: SubscriberContext, clients: ClientTable, topics: SubscribeHandler
    ) -> None:
        self._context = context
        self._durable = context.durable
        self._clients = clients
        self._topics = topics
        self._max_bytes = context.limits.max_uncommitted_bytes
        self.fast_path = PutFastPath(
            clients.find,
            (Block, Append, Commit, Stamp),
            self._is_open,
            context.wall_ns,
            LARGE_BYTES,
            self._max_bytes,
            MAX_KNOWN_TOPICS,
        )

    @property
    def uncommitted_bytes(self) -> int:
        return self.fast_path.uncommitted_bytes

    def put(self, client: ClientEntry, request: Request, caller: Identity, then: OnResult) -> None:
        """Submit a PUT that is not exclusive."""
        if client.is_fenced(request):
            then(client.fenced_error(request))
            return
        body = request.body[0] if len(request.body) == 1 else b"".join(request.body)
        self._submit(
            client, request, caller, then, request_digest(request, body), self._block(body)
        )

    def reserve(self, request: Request, then: OnResult) -> ReservedBytes | None:
        """Reserve bytes for a PUT that has to wait, so that waiting PUTs are bounded too.

        Returns None if there is no room. `then` has then been called with the error.
        """
        size = sum(map(len, request.body))
        return ReservedBytes(self, size, then) if self._has_room(size, then) else None

    def put_held(
        self, client: ClientEntry, request: Request, caller: Identity, held: ReservedBytes
    ) -> None:
        """Submit a PUT that has waited for its turn."""
        held.release()
        self.put(client, request, caller, held.then)

    def put_large(
        self, client: ClientEntry, request: Request, caller: Identity, held: ReservedBytes
    ) -> None:
        """Prepare a large PUT on a worker. It is exclusive until it is submitted."""
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

        self._context.workers(lambda: self._prepare_large(request), ready)

    def flush(self) -> None:
        """Submit the commits of this turn."""
        puts, commits = self.fast_path.hand_over()
        if puts:
            futures = self._durable.store.commit_all(commits)
            PutBatch(puts, futures, self._context.run_on_loop, self._on_batch_committed)

    def _prepare_large(self, request: Request) -> tuple[bytes, Block]:
        body = b"".join(request.body)
        return request_digest(request, body), self._block(body)

    def _block(self, body: bytes) -> Block:
        now_ms = self._context.wall_ns() // NS_PER_MS
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
            self._context.run_on_loop(self.flush)  # in case no on_turn_end comes first
        self.fast_path.add(put, commit)

    def _appends(self, topic: Topic, block: Block) -> tuple[Append, ...]:
        """Return the appends. Enables the fast path for a topic with one shard and no bound."""
        name = topic.name.encode()
        if len(topic.open_shards) == 1 and not topic.settings.get(MAX_BYTES):
            hashed = blake2b(_digest_head(PUT, name), digest_size=DIGEST_BYTES)
            self.fast_path.learn(name, Target(topic, topic.open_shards[0], hashed))
        return self._durable.build_appends(topic, block)

    def _is_open(self, topic: Topic) -> bool:
        """Return True if the fast path may take PUTs to this topic."""
        if (
            self._context.policy.has_rules_for(PRODUCE)
            or self._durable.find(topic.name) is not topic
        ):
            return False
        return not self._topics.is_in_removal(topic)

    def _has_room(self, size: int, then: OnResult) -> bool:
        if self.uncommitted_bytes + size <= self._max_bytes:
            return True
        text = f"{self._max_bytes} bytes are uncommitted; retry"
        then(LimitReached("max_uncommitted_bytes", text))
        return False

    def _refusal(self, caller: Identity, name: str, topic: Topic | None) -> PolybusError | None:
        if self._context.policy.has_rules_for(PRODUCE):
            try:
                self._context.binding.check_allowed(caller, PRODUCE, name)
            except Denied as error:
                return error
        if topic is None:
            return self._context.binding.missing_topic_error(name)
        if self._topics.is_in_removal(topic):
            return DoesNotExist(f"no topic {name!r}: its last subscriber has left")
        return None

    def _on_batch_committed(self, batch: PutBatch) -> None:
        results, next_ids = self.fast_path.outcomes(batch.futures, error_from_future)
        for number, next_id in next_ids.items():  # before any client is answered
            self._durable.advance(number, next_id)
        self.fast_path.land(batch.puts, results, self._on_put_committed, self._clients.run_queued)

    def _on_put_committed(self, put: Put, result: CommitResult | PolybusError) -> None:
        size = len(put.block.data)
        self.fast_path.uncommitted_bytes -= size
        if put.bounded is not None:
            self._durable.add_in_flight(put.bounded, -size)
            put.bounded = None
        if not isinstance(result, PolybusError):
            put.then(subscriber_records.decode_outcome(result))
            self._clients.finish_shared(put.client, put.counter)
        elif isinstance(result, DoesNotExist) and not isinstance(result, UnknownProducer):
            # The topic was dropped while the PUT was in flight. That is its answer, and stored.
            put.client.in_flight -= 1
            refusal = DoesNotExist(f"no topic {put.topic!r}")
            self._enqueue(
                put, Commit(stamp=put.stamp, note=subscriber_records.encode_refusal(refusal))
            )
        else:
            put.then(Stale(STALE) if isinstance(result, Stale) else result)
            self._clients.finish_shared(put.client, 0)


def request_digest(request: Request, body: bytes = b"") -> bytes:
    """Return a digest by which the store detects two requests with the same counter."""
    head = _digest_head(request.op, request.topic.encode())
    if len(body) <= JOINED_BYTES:
        return blake2b(head + body, digest_size=DIGEST_BYTES).digest()
    digest = blake2b(head, digest_size=DIGEST_BYTES)
    digest.update(body)
    return digest.digest()


def _digest_head(op: bytes, topic: bytes) -> bytes:
    return b"%b\0%b\0" % (op, topic)
