"""Clients: their epochs and counters, and the order of what each asks for.

A client is loaded when it is first heard of, and forgotten when many others were heard
of since; what the loop knows of it is what the store knows.

Requests of one client take effect in the order they came. Puts and gets go side by
side: the store judges their stamps one after the other, so that a copy of a put that is
still on its way to the disk gets the same answer, later. What changes more than a
message (HELLO, SUB, UNSUB, a very large PUT) goes alone: it waits for what is under way,
and what comes then waits for it.
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

UNKNOWN_EPOCH: Final = -1  # no HELLO of it has come: an epoch that no request has
MAX_LOADED: Final = 32_768  # clients in memory; some 500 bytes each


class ClientEntry(ClientState):
    """What the short path looks at, too, is the kernel's (`put_fast_path`)."""

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
            return Fenced("this bus has had no HELLO of this client: say HELLO first")
        if request.epoch > self.epoch:
            return Fenced(
                f"epoch {request.epoch} was never given here, the newest is {self.epoch}: was "
                "the bus restored from a backup? Start the client again"
            )
        return Fenced(
            f"epoch {request.epoch} has ended: a client of this id was started since, "
            f"with epoch {self.epoch}"
        )


class QueuedRequest(NamedTuple):
    """Something that a client waits for."""

    act: Callable[[ClientEntry], None]
    then: OnResult
    alone: bool


class HelloResult(NamedTuple):
    """What HELLO gives: an epoch, and the highest counter that is stored."""

    epoch: int
    counter: int


class ClientTable:
    def __init__(self, means: SubscriberContext, known: int) -> None:
        """`known` is how many clients the store has records of."""
        self._means = means
        self._max_waiting = means.limits.max_client_requests
        self._loaded: OrderedDict[bytes, ClientEntry] = OrderedDict()
        # The client, if it is loaded. Each put asks for one: a method would be a call more.
        self.find: Callable[[bytes], ClientEntry | None] = self._loaded.get
        self.count = known

    def find_ready(self, client: bytes) -> ClientEntry | None:
        """The client, if what it asks for next can be done at once, beside what is under way."""
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
        """Has it done as soon as it is its turn; one that goes alone calls `finished`."""
        found = self._loaded.get(client)
        if found is None:
            found = self._load(client)
        else:
            self._loaded.move_to_end(client)
        if found.waiting is None:
            found.waiting = deque()
        elif len(found.waiting) >= self._max_waiting:
            text = f"{self._max_waiting} requests of this client wait already: send it again"
            then(LimitReached("max_client_requests", text))
            return
        found.waiting.append(QueuedRequest(act, then, alone))
        self.run_queued(found)

    def finish_exclusive(self, client: ClientEntry) -> None:
        """What went alone is done."""
        client.alone = False
        self.run_queued(client)

    def finish_shared(self, client: ClientEntry, counter: int) -> None:
        """One of those that go side by side is done; 0: it has changed nothing."""
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
        """HELLO; goes alone."""
        room = self.count < self._means.limits.max_clients
        store = self._means.durable.store
        self._means.workers(
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
        store = self._means.durable.store
        self._means.workers(
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
        wishes, client.waiting = client.waiting or (), None
        for wish in wishes:
            wish.then(error)

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
    """On a worker. The number is written first: whatever ends this in between, it is the same
    epoch that a copy of the HELLO will get."""
    found = store.get(subscriber_records.counter_key(client))
    given = HelloHistory.decode(found.value) if found else HelloHistory()
    epoch = given.epoch_of(number)
    if epoch is None:
        if found is None and not room:
            raise LimitReached("max_clients", "this bus knows as many clients as it may")
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
