"""Clients: HELLO, their epochs and counters, and the order of their requests.

A client is loaded from the store with its first request, and evicted when MAX_LOADED others
were used since. The table never knows more of a client than the store does.

Requests of one client take effect in the order in which they arrive. PUTs and GETs run
concurrently: the store checks their stamps one after another, so a copy of a PUT in flight gets
the same answer. Requests that change more than a message (HELLO, SUB, UNSUB, a very large PUT)
are exclusive: they wait for the requests in flight, and later requests wait for them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final, NamedTuple

from polybus.dialects.pirate.client_id import format_client_id
from polybus.dialects.pirate.codec import ClientRequest
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.put_fast_path import ClientState
from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    SubscriberContext,
    error_from_future,
)
from polybus.dialects.pirate.server.subscriber_records import HelloHistory
from polybus.errors import DoesNotExist, Fenced, LimitReached
from polybus.model.commit import Commit, RecordChange
from polybus.model.identity import Identity
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

    def update(self, stored: ProducerEpoch | None) -> None:
        if stored is not None:
            self.epoch, self.counter = stored.epoch, max(self.counter, stored.last_counter)

    def is_fenced(self, request: ClientRequest) -> bool:
        return request.epoch != self.epoch

    def fenced_error(self, request: ClientRequest) -> Fenced:
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

    run: Callable[[ClientEntry], None]
    then: OnResult
    alone: bool


class HelloResult(NamedTuple):
    """The result of HELLO: an epoch, and the highest stored counter."""

    epoch: int
    counter: int


class ClientTable:
    """The loaded clients, and the queue of each. Executes HELLO."""

    def __init__(self, context: SubscriberContext, stored: Mapping[str, int]) -> None:
        """`stored` is the number of clients in the store, by account."""
        self._context = context
        self._shares = context.shares.new_table(
            "max_clients", context.limits.max_clients, context.count_refused
        )
        for account, clients in stored.items():
            self._shares.restore(account, clients)
        self._max_waiting = context.limits.max_client_requests
        self._loaded: OrderedDict[bytes, ClientEntry] = OrderedDict()
        # Returns a loaded client. A bound dict method, because every PUT calls it.
        self.find: Callable[[bytes], ClientEntry | None] = self._loaded.get

    @property
    def count(self) -> int:
        """The number of clients in the store."""
        return self._shares.used

    def hello(self, request: ClientRequest, caller: Identity, then: OnResult) -> None:
        """Execute HELLO (exclusive). A copy of a HELLO gets the epoch of the first."""

        def run(client: ClientEntry) -> None:
            # Only the store knows whether the client is new. So a place is taken first, and a
            # refusal counts only if the client is new.
            refusal: LimitReached | None = None
            try:
                self._shares.take(caller)
            except LimitReached as error:
                refusal = error
            opening = EpochOpening(
                self._context.durable.store,
                client.id,
                request.counter,
                caller.account_name,
                refusal,
            )

            def on_opened(future: Future[tuple[int, ProducerEpoch]]) -> None:
                if refusal is None and not opening.is_new:
                    self._shares.release(caller.account_name)
                error = error_from_future(future)
                if error is None:
                    epoch, newest = future.result()
                    client.update(newest)
                    then(HelloResult(epoch, client.counter))
                else:
                    then(error)
                self.finish_exclusive(client)

            self._context.workers(opening.run, on_opened)

        self.queue(request.client, run, then, alone=True)

    def remove(self, client_id: bytes, then: OnResult) -> None:
        """Remove a client (exclusive). Calls `then` with its account or an error.

        Its epoch and counter stay in the store, so that its later requests are fenced until it
        sends HELLO again, and a request that it repeats then still counts once.
        """
        store = self._context.durable.store

        def run(client: ClientEntry) -> None:
            def on_removed(future: Future[tuple[str, ProducerEpoch]]) -> None:
                error = error_from_future(future)
                if error is None:
                    account, newest = future.result()
                    self._shares.release(account)
                    client.update(newest)
                    then(account)
                else:
                    then(error)
                self.finish_exclusive(client)

            self._context.workers(lambda: _remove_client(store, client_id), on_removed)

        self.queue(client_id, run, then, alone=True)

    # --- the order of requests

    def find_ready(self, client_id: bytes) -> ClientEntry | None:
        """Return the client if its next request may run now, or None."""
        client = self._loaded.get(client_id)
        if client is None or client.alone or client.waiting:
            return None
        return client

    def queue(
        self,
        client_id: bytes,
        run: Callable[[ClientEntry], None],
        then: OnResult,
        *,
        alone: bool = False,
    ) -> None:
        """Call `run` when it is its turn. An exclusive one must call `finish_exclusive`.

        If it never runs, `then` is called with the error instead.
        """
        client = self._loaded.get(client_id)
        if client is None:
            client = self._load(client_id)
        else:
            self._loaded.move_to_end(client_id)
        if client.waiting is None:
            client.waiting = deque()
        elif len(client.waiting) >= self._max_waiting:
            text = f"{self._max_waiting} requests of this client are waiting; retry"
            then(LimitReached("max_client_requests", text))
            return
        client.waiting.append(QueuedRequest(run, then, alone))
        self.run_queued(client)

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
            waiting.popleft().run(client)
        # `run` may have answered requests at once, and so have begun another queue.
        if client.waiting is waiting and not waiting:
            client.waiting = None

    # --- loading

    def _load(self, client_id: bytes) -> ClientEntry:
        """Add a client and read its epoch and counter. Its requests wait for that."""
        client = self._loaded[client_id] = ClientEntry(client_id)
        client.alone = True
        store = self._context.durable.store

        def on_loaded(future: Future[ProducerEpoch | None]) -> None:
            error = error_from_future(future)
            if error is None:
                client.update(future.result())
                self.finish_exclusive(client)
                return
            # Not kept, so that the next request reads it again.
            self._loaded.pop(client_id, None)
            waiting, client.waiting = client.waiting or (), None
            for request in waiting:
                request.then(error)

        self._context.workers(lambda: store.look_up_producer(client.producer), on_loaded)
        # Evict the least recently used. A busy client is passed over, so one call looks at a
        # few only and the table may exceed MAX_LOADED for a while.
        for _ in range(min(4, len(self._loaded) - MAX_LOADED)):
            oldest_id, oldest = next(iter(self._loaded.items()))
            if oldest.alone or oldest.in_flight or oldest.waiting:
                self._loaded.move_to_end(oldest_id)
            else:
                del self._loaded[oldest_id]
        return client


class EpochOpening:
    """Opens an epoch for a HELLO with a random number. `run` is for a worker.

    `refusal` is raised if the client is new. `is_new` is True once a new client is stored.
    """

    def __init__(
        self, store: Store, client: bytes, number: int, account: str, refusal: LimitReached | None
    ) -> None:
        self._store = store
        self._client = client
        self._number = number
        self._account = account
        self._refusal = refusal
        self.is_new = False

    def run(self) -> tuple[int, ProducerEpoch]:
        """Return the epoch, and the producer's state."""
        store, key = self._store, subscriber_records.counter_key(self._client)
        producer = subscriber_records.producer_name(self._client)
        record = store.get(key)
        newest = store.look_up_producer(producer)
        if record is not None:
            history = HelloHistory.decode(record.value)
        else:  # a client that was removed has a producer, whose epochs must not be used again
            history = HelloHistory(newest.epoch if newest else 0)
        epoch = history.epoch_of(self._number)
        if epoch is None:
            if record is None and self._refusal is not None:
                raise self._refusal
            # The number is stored before the epoch is opened. A copy of this HELLO after a crash
            # then gets the same epoch.
            history = history.with_number(self._number)
            epoch = history.newest
            changes = [RecordChange(key, history.encode(), record.version if record else 0)]
            if record is None:
                account = subscriber_records.encode_account(self._account)
                changes.append(RecordChange(subscriber_records.account_key(self._client), account))
            store.commit(Commit(changes=tuple(changes))).result()
            self.is_new = record is None
        # A crash between the two commits leaves the producer behind the stored numbers.
        while newest is None or newest.epoch < history.newest:
            newest = store.open_producer(producer, subscriber_records.PRODUCER_OPTIONS)
        return epoch, newest


def _remove_client(store: Store, client: bytes) -> tuple[str, ProducerEpoch]:
    """Remove the records of a client and end its epoch. Runs on a worker."""
    keys = subscriber_records.counter_key(client), subscriber_records.account_key(client)
    if store.get(keys[0]) is None:
        raise DoesNotExist(f"no client {format_client_id(client)}")
    account = subscriber_records.read_account(store, client)
    # The epoch ends first: requests that the client has sent before must find it ended.
    newest = store.open_producer(
        subscriber_records.producer_name(client), subscriber_records.PRODUCER_OPTIONS
    )
    store.commit(Commit(changes=tuple(RecordChange(key, None) for key in keys))).result()
    return account, newest
