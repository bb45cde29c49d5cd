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

from polybus.dialects.pirate.server import stored_answers
from polybus.dialects.pirate.server.put_fast_path import Put, ShortPuts, Target
from polybus.dialects.pirate.server.subscriber_context import Means, Request, Then, fault_of
from polybus.durable.topic_registry import MAX_BYTES
from polybus.errors import Denied, DoesNotExist, LimitReached, PolybusError, Stale, UnknownProducer
from polybus.model.access_rule import PRODUCE
from polybus.model.block import Block
from polybus.model.commit import Append, Commit
from polybus.model.stamp import Stamp

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.client_table import Client, Clients
    from polybus.dialects.pirate.server.subscribe_handler import Subscribing
    from polybus.durable.publisher import Soon
    from polybus.model.commit import Committed
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


class Flight:
    """Some puts that were handed over together, and go on when all of them are on disk.

    The store tells on a thread of its own, and mostly of all of them at once: so the last is
    waited for, and then whoever is still missing.
    """

    __slots__ = ("futures", "land", "puts", "soon")

    def __init__(
        self,
        puts: list[Put],
        futures: list[Future[Committed]],
        soon: Soon,
        land: Callable[[Flight], None],
    ) -> None:
        self.puts = puts
        self.futures = futures
        self.soon = soon
        self.land = land
        futures[-1].add_done_callback(self._told)

    def _told(self, _future: Future[Committed]) -> None:
        self.soon(self._look)

    def _look(self) -> None:
        for future in self.futures:
            if not future.done():
                future.add_done_callback(self._told)
                return
        self.land(self)


class Held:
    """Bytes that wait for their turn: counted until it comes, or will not come."""

    __slots__ = ("_putting", "_size", "then")

    def __init__(self, putting: Putting, size: int, then: Then) -> None:
        self._putting = putting
        self._size = size
        self.then = then
        putting.short.uncommitted_bytes += size

    def release(self) -> None:
        self._putting.short.uncommitted_bytes -= self._size
        self._size = 0

    def tell(self, came: Any) -> None:
        self.release()
        self.then(came)


class Putting:
    def __init__(self, means: Means, clients: Clients, topics: Subscribing) -> None:
        self._means = means
        self._durable = means.durable
        self._clients = clients
        self._topics = topics
        self._max_bytes = means.limits.max_uncommitted_bytes
        self.short = ShortPuts(
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
        return self.short.uncommitted_bytes

    def put(self, client: Client, request: Request, caller: Identity, then: Then) -> None:
        """A small one, which goes beside others."""
        if client.is_fenced(request):
            then(client.fenced(request))
            return
        body = request.body[0] if len(request.body) == 1 else b"".join(request.body)
        self._send(client, request, caller, then, digest(request, body), self._block(body))

    def hold(self, request: Request, then: Then) -> Held | None:
        """Room for one that has to wait for its turn, so that what waits is bounded, too.

        None if there is none, and that was told.
        """
        size = sum(map(len, request.body))
        return Held(self, size, then) if self._fits(size, then) else None

    def put_held(self, client: Client, request: Request, caller: Identity, held: Held) -> None:
        """One that has waited for its turn."""
        held.release()
        self.put(client, request, caller, held.then)

    def put_large(self, client: Client, request: Request, caller: Identity, held: Held) -> None:
        """Goes alone while it is made ready, and no longer."""
        if client.is_fenced(request):
            held.tell(client.fenced(request))
            self._clients.finished(client)
            return

        def ready(future: Future[tuple[bytes, Block]]) -> None:
            held.release()
            error = fault_of(future)
            if error is None:
                self._send(client, request, caller, held.then, *future.result())
            else:
                held.then(error)
            self._clients.finished(client)

        self._means.workers(lambda: self._made_ready(request), ready)

    def flush(self) -> None:
        """Hands over what the turn has brought."""
        puts, commits = self.short.hand_over()
        if puts:
            futures = self._durable.store.commit_all(commits)
            Flight(puts, futures, self._means.soon, self._landed)

    def _made_ready(self, request: Request) -> tuple[bytes, Block]:
        body = b"".join(request.body)
        return digest(request, body), self._block(body)

    def _block(self, body: bytes) -> Block:
        now_ms = self._means.wall_ns() // NS_PER_MS
        return Block.from_columns(body, array("i", (0, len(body))), insertion_ms=now_ms)

    def _send(
        self,
        client: Client,
        request: Request,
        caller: Identity,
        then: Then,
        asked: bytes,
        block: Block,
    ) -> None:
        size = len(block.data)
        if not self._fits(size, then):
            return
        stamp = Stamp(client.producer, request.epoch, request.counter, asked)
        put = Put(client, request.counter, request.topic, then, stamp, block)
        topic = self._durable.find(request.topic)
        refusal = self._refusal(caller, request.topic, topic)
        if topic is None or refusal is not None:
            assert refusal is not None
            commit = Commit(stamp=stamp, note=stored_answers.of_refusal(refusal))
        else:
            try:
                commit = Commit(self._appends(topic, block), (), (), stamp, b"")
            except PolybusError as error:  # the topic's own bound
                then(error)
                return
            if topic.settings.get(MAX_BYTES):
                put.bounded = topic
                self._durable.depart(topic, size)
        self._depart(put, commit)

    def _depart(self, put: Put, commit: Commit) -> None:
        if not self.short.has_waiting():
            self._means.soon(self.flush)  # if no turn's end comes before
        self.short.add(put, commit)

    def _appends(self, topic: Topic, block: Block) -> tuple[Append, ...]:
        """What nearly all topics of subscribers have, one shard and no bound, is learned."""
        name = topic.name.encode()
        if len(topic.open_shards) == 1 and not topic.settings.get(MAX_BYTES):
            hashed = blake2b(_head(PUT, name), digest_size=DIGEST_BYTES)
            self.short.learn(name, Target(topic, topic.open_shards[0], hashed))
        return self._durable.appends(topic, block)

    def _is_open(self, topic: Topic) -> bool:
        """Whether puts to a topic that was learned may go by the short path."""
        if self._means.policy.mentions(PRODUCE) or self._durable.find(topic.name) is not topic:
            return False
        return not self._topics.is_leaving(topic)

    def _fits(self, size: int, then: Then) -> bool:
        if self.uncommitted_bytes + size <= self._max_bytes:
            return True
        text = f"{self._max_bytes} bytes are on their way to the disk: send it again"
        then(LimitReached("max_uncommitted_bytes", text))
        return False

    def _refusal(self, caller: Identity, name: str, topic: Topic | None) -> PolybusError | None:
        if self._means.policy.mentions(PRODUCE):
            try:
                self._means.binding.judge(caller, PRODUCE, name)
            except Denied as error:
                return error
        if topic is None:
            return self._means.binding.missing(name)
        if self._topics.is_leaving(topic):
            return DoesNotExist(f"there is no topic {name!r}: its last subscriber has left")
        return None

    def _landed(self, flight: Flight) -> None:
        came, reached = self.short.outcomes(flight.futures, fault_of)
        self._durable.reach_all(reached)  # before anybody is told
        self.short.land(flight.puts, came, self._done, self._clients.proceed)

    def _done(self, put: Put, came: Committed | PolybusError) -> None:
        size = len(put.block.data)
        self.short.uncommitted_bytes -= size
        if put.bounded is not None:
            self._durable.depart(put.bounded, -size)
            put.bounded = None
        if not isinstance(came, PolybusError):
            put.then(stored_answers.outcome(came))
            self._clients.landed(put.client, put.counter)
        elif isinstance(came, DoesNotExist) and not isinstance(came, UnknownProducer):
            # The topic went while the message was on its way: that is the answer, and stored.
            put.client.in_flight -= 1
            refusal = DoesNotExist(f"there is no topic {put.topic!r} any more")
            self._depart(put, Commit(stamp=put.stamp, note=stored_answers.of_refusal(refusal)))
        else:
            put.then(Stale(STALE) if isinstance(came, Stale) else came)
            self._clients.landed(put.client, 0)


def digest(request: Request, body: bytes = b"") -> bytes:
    """Tells requests apart that use one counter."""
    head = _head(request.op, request.topic.encode())
    if len(body) <= JOINED_BYTES:
        return blake2b(head + body, digest_size=DIGEST_BYTES).digest()
    found = blake2b(head, digest_size=DIGEST_BYTES)
    found.update(body)
    return found.digest()


def _head(op: bytes, topic: bytes) -> bytes:
    return b"%b\0%b\0" % (op, topic)
