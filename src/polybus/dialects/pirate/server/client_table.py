"""Clients: their epochs and counters, and the order of their requests.

A client is loaded from the store with its first request, and evicted when MAX_LOADED others
were used since. The table never knows more of a client than the store does.

Requests of one client take effect in the order in which they arrive. PUTs and GETs run
concurrently: the store checks their stamps one after another, so a copy of a PUT in flight gets
the same answer. Requests that change more than a message (HELLO, SUB, UNSUB, a very large PUT)
are exclusive: they wait for the requests in flight, and later requests wait for them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.put_fast_path import ClientState
from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    SubscriberContext,
    error_from_future,
)
from polybus.dialects.pirate.server.subscriber_records import HelloHistory
from polybus.errors import Fenced, LimitReached
from polybus.model.commit import Commit, RecordChange

if TYPE_CHECKING:
    from concurrent.futures import Future

    from polybus.dialects.pirate.server.subscriber_context import Request
    from polybus.model.stamp import ProducerEpoch
    from polybus.store.contract import Store

UNKNOWN_EPOCH: Final = -1  # no HELLO yet; no request has this epoch
MAX_LOADED: Final = 32_768  # clients in memory; some 500 bytes each


class ClientEntry(ClientState):
    """A loaded client. The fields are in `put_fast_path`, which reads them too."""

    __slots__ = ()
    waiting: deque[QueuedRequest] | None

    def __init__(self, client: bytes) -> None:
        super().__init__(client, subscriber_records.producer_name(client), UNKNOWN_EPOCH)

    @property
    def is_idle(self) -> bool:
        return not (self.alone or self.in_flight or self.waiting)

    def update(self, opened: ProducerEpoch | None) -> None:
        if opened is not None:
            self.epoch, self.counter = opened.epoch, max(self.counter, opened.last_counter)

    def is_fenced(self, request: Request) -> bool:
        return request.epoch != self.epoch

    def fenced_error(self, request: Request) -> Fenced:
        if self.epoch == UNKNOWN_EPOCH:
            return Fenced("the bus has no HELLO of this client; send HELLO first")
        if request.epoch > self.epoch:
            return Fenced(
                f"epoch {request.epoch} is unknown, the newest is {self.epoch}; if the bus was "
                "restored from a backup, restart the client"
            )
        return Fenced(
            f"epoch {request.epoch} has ended: another client with this id has started, "
            f"with epoch {self.epoch}"
        )


class QueuedRequest(NamedTuple):
    """A request that waits for its turn. An exclusive one is `alone`."""

    act: Callable[[ClientEntry], None]
    then: OnResult
    alone: bool


class HelloResult(NamedTuple):
    """The result of HELLO: an epoch, and the highest stored counter."""

    epoch: int
    counter: int


class ClientTable:
    """The loaded clients, and the queue of each."""

    def __init__(self, context: SubscriberContext, known: int) -> None:
        """`known` is the number of clients in the store."""
        self._context = context
        self._max_waiting = context.limits.max_client_requests
        self._loaded: OrderedDict[bytes, ClientEntry] = OrderedDict()
        # Returns a loaded client. A bound dict method, because every PUT calls it.
        self.find: Callable[[bytes], ClientEntry | None] = self._loaded.get
        self.count = known

    def find_ready(self, client: bytes) -> ClientEntry | None:
        """Return the client if its next request may run now, or None."""
        found = self._loaded.get(client)
        if found is None or found.alone or found.waiting:
            return None
        return found

    def queue(
        self,
        client: bytes,
        act: Callable[[ClientEntry], None],
        then: OnResult,
        *,
        alone: bool = False,
    ) -> None:
        """Run `act` when it is its turn. An exclusive one must call `finish_exclusive`."""
        found = self._loaded.get(client)
        if found is None:
            found = self._load(client)
        else:
            self._loaded.move_to_end(client)
        if found.waiting is None:
            found.waiting = deque()
        elif len(found.waiting) >= self._max_waiting:
            text = f"{self._max_waiting} requests of this client are waiting; retry"
            then(LimitReached("max_client_requests", text))
            return
        found.waiting.append(QueuedRequest(act, then, alone))
        self.run_queued(found)

    def finish_exclusive(self, client: ClientEntry) -> None:
        """End an exclusive request and run the queue."""
        client.alone = False
        self.run_queued(client)

    def finish_shared(self, client: ClientEntry, counter: int) -> None:
        """End a concurrent request. `counter` is 0 if it has changed nothing."""
        client.in_flight -= 1
        client.counter = max(client.counter, counter)
        if client.waiting:
            self.run_queued(client)

    def run_queued(self, client: ClientEntry) -> None:
        waiting = client.waiting
        while waiting and not client.alone:
            if waiting[0].alone:
                if client.in_flight:
                    return
                client.alone = True
            waiting.popleft().act(client)
        if client.waiting is waiting and not waiting:
            client.waiting = None

    def open_epoch(self, client: ClientEntry, number: int, then: OnResult) -> None:
        """Execute HELLO (exclusive)."""
        room = self.count < self._context.limits.max_clients
        store = self._context.durable.store
        self._context.workers(
            lambda: _open_epoch(store, client.id, number, room),
            lambda future: self._on_epoch_opened(client, future, then),
        )

    def _on_epoch_opened(
        self, client: ClientEntry, future: Future[tuple[int, ProducerEpoch, bool]], then: OnResult
    ) -> None:
        error = error_from_future(future)
        if error is None:
            epoch, opened, is_new = future.result()
            self.count += is_new
            client.update(opened)
            then(HelloResult(epoch, client.counter))
        else:
            then(error)
        self.finish_exclusive(client)

    def _load(self, client: bytes) -> ClientEntry:
        found = self._loaded[client] = ClientEntry(client)
        found.alone = True
        store = self._context.durable.store
        self._context.workers(
            lambda: store.look_up_producer(found.producer),
            lambda future: self._on_loaded(found, future),
        )
        self._evict_idle()
        return found

    def _on_loaded(self, client: ClientEntry, future: Future[ProducerEpoch | None]) -> None:
        error = error_from_future(future)
        if error is None:
            client.update(future.result())
            self.finish_exclusive(client)
            return
        self._loaded.pop(client.id, None)
        waiting, client.waiting = client.waiting or (), None
        for request in waiting:
            request.then(error)

    def _evict_idle(self) -> None:
        for _ in range(min(4, len(self._loaded) - MAX_LOADED)):
            client, found = next(iter(self._loaded.items()))
            if found.is_idle:
                del self._loaded[client]
            else:
                self._loaded.move_to_end(client)


def _open_epoch(
    store: Store, client: bytes, number: int, room: bool
) -> tuple[int, ProducerEpoch, bool]:
    """Open an epoch for the HELLO with this random number. Runs on a worker.

    Returns the epoch, the producer's state, and True if the client is new.
    """
    found = store.get(subscriber_records.counter_key(client))
    given = HelloHistory.decode(found.value) if found else HelloHistory()
    epoch = given.epoch_of(number)
    if epoch is None:
        if found is None and not room:
            raise LimitReached("max_clients", "the bus has the maximum number of clients")
        # The number is stored before the epoch is opened. A copy of this HELLO after a crash
        # then gets the same epoch.
        given = given.with_number(number)
        epoch = given.newest
        version = found.version if found else 0
        change = RecordChange(subscriber_records.counter_key(client), given.encode(), version)
        store.commit(Commit(changes=(change,))).result()
    opened = store.look_up_producer(subscriber_records.producer_name(client))
    while opened is None or opened.epoch < given.newest:
        opened = store.open_producer(
            subscriber_records.producer_name(client), subscriber_records.PRODUCER_OPTIONS
        )
    return epoch, opened, found is None
