"""PUT: one message, one stamped commit.

The store decides the result of a PUT, by its stamp first: a copy of a committed PUT gets the
same answer, even if its topic is gone. A refusal that uses up the counter is also a commit,
with only the stamp and the refusal.

    put            a PUT of the slow path: runs now, waits for its client, or is prepared first
    _submit        stamp, refusal or append: the commit that decides it
    flush          a turn's PUTs, of both paths, in one call of the store
    _on_committed  the answers

`put_fast_path` takes most PUTs from their frames to their commits.
"""

from __future__ import annotations

from array import array
from collections.abc import Container
from concurrent.futures import Future
from hashlib import blake2b
from typing import Final

from polybus.dialects.pirate.codec import PUT, ClientRequest
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.client_table import ClientEntry, ClientTable
from polybus.dialects.pirate.server.put_fast_path import Put, PutFastPath, Target
from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    SubscriberContext,
    error_from_future,
    unknown_user_error,
)
from polybus.durable.topic_registry import MAX_BYTES
from polybus.errors import Denied, DoesNotExist, LimitReached, PolybusError, Stale, UnknownProducer
from polybus.model.access_rule import PRODUCE
from polybus.model.block import Block
from polybus.model.commit import Append, Commit, CommitResult
from polybus.model.identity import Identity
from polybus.model.stamp import Stamp
from polybus.model.topic import Topic

NS_PER_MS: Final = 1_000_000
# Larger bodies are copied and hashed on a worker, because the loop would block too long.
LARGE_BYTES: Final = 256 << 10
MAX_KNOWN_TOPICS: Final = 65_536


class PutHandler:
    """Executes PUT."""

    def __init__(
        self,
        context: SubscriberContext,
        clients: ClientTable,
        topics_in_removal: Container[int],
    ) -> None:
        self._context = context
        self._durable = context.durable
        self._clients = clients
        self._topics_in_removal = topics_in_removal
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

    def put(self, request: ClientRequest, caller: Identity, then: OnResult) -> None:
        """Execute a PUT. Calls `then` with the message id or the error."""
        size = sum(map(len, request.body))
        is_large = size > LARGE_BYTES
        client = None if is_large else self._clients.find_ready(request.client)
        if client is not None:
            self._put_now(client, request, caller, then)
            return
        # The body counts as uncommitted from now on, so that waiting PUTs are bounded too.
        if not self._has_room(size, then):
            return
        self.fast_path.uncommitted_bytes += size

        def on_not_run(error: PolybusError) -> None:
            self.fast_path.uncommitted_bytes -= size
            then(error)

        def run(client: ClientEntry) -> None:
            if is_large:
                self._prepare_large(client, request, caller, then, size)
            else:
                self.fast_path.uncommitted_bytes -= size
                self._put_now(client, request, caller, then)

        self._clients.queue(request.client, run, on_not_run, alone=is_large)

    def _put_now(
        self, client: ClientEntry, request: ClientRequest, caller: Identity, then: OnResult
    ) -> None:
        if client.is_fenced(request):
            then(client.fenced_error(request))
            return
        body = request.body[0] if len(request.body) == 1 else b"".join(request.body)
        digest = subscriber_records.request_digest(request, body)
        self._submit(client, request, caller, then, digest, self._block(body))

    def _prepare_large(
        self,
        client: ClientEntry,
        request: ClientRequest,
        caller: Identity,
        then: OnResult,
        size: int,
    ) -> None:
        """Prepare a large PUT on a worker. It is exclusive until it is submitted.

        So later requests of the client do not overtake it. `size` bytes are reserved for it.
        """
        if client.is_fenced(request):
            self.fast_path.uncommitted_bytes -= size
            then(client.fenced_error(request))
            self._clients.finish_exclusive(client)
            return

        def prepare() -> tuple[bytes, Block]:
            body = b"".join(request.body)
            return subscriber_records.request_digest(request, body), self._block(body)

        def on_prepared(future: Future[tuple[bytes, Block]]) -> None:
            self.fast_path.uncommitted_bytes -= size
            error = error_from_future(future)
            if error is None:
                self._submit(client, request, caller, then, *future.result())
            else:
                then(error)
            self._clients.finish_exclusive(client)

        self._context.workers(prepare, on_prepared)

    def _block(self, body: bytes) -> Block:
        now_ms = self._context.wall_ns() // NS_PER_MS
        return Block.from_columns(body, array("i", (0, len(body))), insertion_ms=now_ms)

    # --- the commit

    def _submit(
        self,
        client: ClientEntry,
        request: ClientRequest,
        caller: Identity,
        then: OnResult,
        digest: bytes,
        block: Block,
    ) -> None:
        # Checked again for a PUT that has waited: its reservation was released, and the block is
        # larger than the body.
        size = len(block.data)
        if not self._has_room(size, then):
            return
        stamp = Stamp(client.producer, request.epoch, request.counter, digest)
        put = Put(client, request.counter, request.topic, then, stamp, block)
        topic = self._durable.find(request.topic)
        refusal = self._refusal(caller, request.topic, topic)
        if caller.is_in_doubt and isinstance(refusal, Denied):
            then(unknown_user_error())
            return
        if topic is None or refusal is not None:
            assert refusal is not None
            self._enqueue(put, _refusal_commit(stamp, refusal))
            return
        try:
            appends = self._durable.build_appends(topic, block)
        except PolybusError as error:  # paused, or over its max_bytes; the counter is not used
            then(error)
            return
        is_bounded = bool(topic.settings.get(MAX_BYTES))
        if len(topic.open_shards) == 1 and not is_bounded:
            # Later PUTs to this topic may take the fast path. A pause replaces the `Topic`.
            name = topic.name.encode()
            head = subscriber_records.digest_head(PUT, name)
            hashed = blake2b(head, digest_size=subscriber_records.DIGEST_BYTES)
            self.fast_path.learn(name, Target(topic, topic.open_shards[0], hashed))
        if is_bounded:
            put.bounded = topic
            self._durable.add_in_flight(topic, size)
        self._enqueue(put, Commit(appends, (), (), stamp, b""))

    def _has_room(self, size: int, then: OnResult) -> bool:
        if self.fast_path.uncommitted_bytes + size <= self._max_bytes:
            return True
        text = f"{self._max_bytes} bytes are uncommitted; retry"
        then(LimitReached("max_uncommitted_bytes", text))
        return False

    def _refusal(self, caller: Identity, name: str, topic: Topic | None) -> PolybusError | None:
        """Return the error of a PUT that is refused. The refusal is stored as its answer."""
        if self._context.policy.can_deny(PRODUCE, name.encode()):
            try:
                self._context.binding.check_allowed(caller, PRODUCE, name)
            except Denied as error:
                return error
        if topic is None:
            return self._context.binding.missing_topic_error(name)
        if topic.number in self._topics_in_removal:
            return DoesNotExist(f"no topic {name!r}: its last subscriber has left")
        return None

    def _is_open(self, topic: Topic) -> bool:
        """Return True if the fast path may take PUTs to this topic: `_refusal` would be None."""
        return (
            not self._context.policy.can_deny(PRODUCE, topic.name.encode())
            and self._durable.find(topic.name) is topic
            and topic.number not in self._topics_in_removal
        )

    def _enqueue(self, put: Put, commit: Commit) -> None:
        if not self.fast_path.has_waiting():
            self._context.run_on_loop(self.flush)  # in case no on_turn_end comes first
        self.fast_path.add(put, commit)

    # --- submission and answers

    def flush(self) -> None:
        """Submit the commits of this turn. Answers them when all are on disk."""
        puts, commits = self.fast_path.take_batch()
        if not puts:
            return
        futures = self._durable.store.commit_all(commits)

        def on_commit(_future: Future[CommitResult]) -> None:
            self._context.run_on_loop(check_done)  # the store resolves futures on its own thread

        def check_done() -> None:
            # Most futures of a batch are resolved at once, so few checks find one that is not.
            for future in futures:
                if not future.done():
                    future.add_done_callback(on_commit)
                    return
            results, next_ids = self.fast_path.outcomes(futures, error_from_future)
            for number, next_id in next_ids.items():  # before any client is answered
                self._durable.advance(number, next_id)
            self.fast_path.answer(puts, results, self._on_committed, self._clients.run_queued)

        futures[-1].add_done_callback(on_commit)

    def _on_committed(self, put: Put, result: CommitResult | PolybusError) -> None:
        """Answer a PUT of the slow path, or one of the fast path with an unusual result."""
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
            self._enqueue(put, _refusal_commit(put.stamp, refusal))
        else:
            put.then(Stale(subscriber_records.STALE) if isinstance(result, Stale) else result)
            self._clients.finish_shared(put.client, 0)


def _refusal_commit(stamp: Stamp, refusal: PolybusError) -> Commit:
    """Return a commit that uses up the counter, so that a repeat gets the same refusal."""
    return Commit(stamp=stamp, note=subscriber_records.encode_refusal(refusal))
