"""PUT: one message, one stamped commit.

Whatever becomes of a put is decided by the store, stamp first: a copy of one that was
done is answered as that was, also if its topic has gone since. Refusals that use the
counter up are commits, too, with nothing but the stamp and the refusal in them.
"""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from polybus.bus.subscribers import notes, sabotage
from polybus.bus.subscribers.means import Means, Request, Then, fault_of
from polybus.errors import (
    Denied,
    DoesNotExist,
    LimitReached,
    PolybusError,
    Stale,
    UnknownProducer,
)
from polybus.model.block import Block
from polybus.model.commit import Commit
from polybus.model.rules import PRODUCE
from polybus.model.stamp import Stamp

if TYPE_CHECKING:
    from polybus.bus.subscribers.clients import Client, Clients
    from polybus.bus.subscribers.subscribing import Subscribing
    from polybus.model.commit import Committed
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic

NS_PER_MS: Final = 1_000_000
DIGEST_BYTES: Final = 16
# More than this is copied and hashed on a worker: the loop would stand still too long.
LARGE_BYTES: Final = 256 << 10
STALE: Final = "the counter was used before: for another request, or too long ago"


class Putting:
    def __init__(self, means: Means, clients: Clients, topics: Subscribing) -> None:
        self._means = means
        self._durable = means.durable
        self._clients = clients
        self._topics = topics
        self._max_bytes = means.limits.max_uncommitted_bytes
        self.uncommitted_bytes = 0

    def put(self, client: Client, request: Request, caller: Identity, then: Then) -> None:
        """A small one, which goes beside others."""
        if client.is_fenced(request):
            then(client.fenced(request))
            return
        body = request.body[0] if len(request.body) == 1 else b"".join(request.body)
        block = self._block(body)
        self._send(client, request, caller, then, digest(request, body), block)

    def put_large(self, client: Client, request: Request, caller: Identity, then: Then) -> None:
        """Goes alone while it is made ready, and no longer."""
        if client.is_fenced(request):
            then(client.fenced(request))
            self._clients.finished(client)
            return
        size = sum(map(len, request.body))
        if not self._fits(size, then):
            self._clients.finished(client)
            return
        self.uncommitted_bytes += size

        def ready(future: Future[tuple[bytes, Block]]) -> None:
            self.uncommitted_bytes -= size
            error = fault_of(future)
            if error is None:
                self._send(client, request, caller, then, *future.result())
            else:
                then(error)
            self._clients.finished(client)

        self._means.workers(lambda: self._made_ready(request), ready)

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
        topic = self._durable.find(request.topic)
        refusal = self._refusal(caller, request.topic, topic)
        if topic is None or refusal is not None:
            assert refusal is not None
            future = self._durable.commit(Commit(stamp=stamp, note=notes.of_refusal(refusal)))
        else:
            try:
                future = self._durable.produce(topic, block, stamp)
            except PolybusError as error:  # the topic's own bound
                then(error)
                return
        client.in_flight += 1
        self.uncommitted_bytes += size
        done = partial(self._done, client, request, then, stamp, block)
        future.add_done_callback(lambda future: self._means.soon(lambda: done(future)))

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

    def _done(
        self,
        client: Client,
        request: Request,
        then: Then,
        stamp: Stamp,
        block: Block,
        future: Future[Committed],
    ) -> None:
        self.uncommitted_bytes -= len(block.data)
        error = fault_of(future)
        if error is None:
            done = future.result()
            if sabotage.REPLIES_OFF and done.duplicate:
                self._again(request, block)
            then(notes.outcome(done))
            self._clients.landed(client, request.counter)
        elif isinstance(error, DoesNotExist) and not isinstance(error, UnknownProducer):
            self._gone(client, request, then, stamp, block)
        else:
            then(Stale(STALE) if isinstance(error, Stale) else error)
            self._clients.landed(client, 0)

    def _gone(
        self, client: Client, request: Request, then: Then, stamp: Stamp, block: Block
    ) -> None:
        """The topic went while the message was on its way: that is the answer, and stored."""
        refusal = DoesNotExist(f"there is no topic {request.topic!r} any more")
        self.uncommitted_bytes += len(block.data)
        self._means.commit(
            Commit(stamp=stamp, note=notes.of_refusal(refusal)),
            partial(self._done, client, request, then, stamp, block),
        )

    def _again(self, request: Request, block: Block) -> None:
        """What must not be done (`sabotage.REPLIES_OFF`)."""
        topic = self._durable.find(request.topic)
        if topic is not None:
            self._durable.produce(topic, block)


def digest(request: Request, body: bytes = b"") -> bytes:
    """Tells requests apart that use one counter."""
    head = b"%b\0%b\0" % (request.op, request.topic.encode())
    found = blake2b(head, digest_size=DIGEST_BYTES)
    found.update(body)
    return found.digest()
