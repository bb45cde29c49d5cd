"""SUB and UNSUB, and topics that exist as long as they have subscribers.

A SUB creates the topic if it does not exist, and then the subscription, with LAST at the
topic's newest id and the stamp in the same commit. A SUB of an existing subscription returns
its LAST. A topic that SUB created is removed when its last subscriber has left and no group
reads it. A SUB during the removal waits and creates a new topic, whose ids continue.

SUB and UNSUB are exclusive among the requests of a client, so the highest stored counter is
known. A request with a counter up to that changes nothing and is answered by the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.put_handler import STALE, request_digest
from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    Request,
    SubscriberContext,
    error_from_future,
)
from polybus.dialects.pirate.server.subscriber_records import SubscriptionKey
from polybus.durable import query_progress
from polybus.durable.topic_names import CREATOR, NameReservation, creator_record
from polybus.durable.topic_registry import KEEP, KEEP_READ, WITH_SUBSCRIBERS
from polybus.errors import Denied, PolybusError, Stale, WrongKind
from polybus.groups.group_records import roster_prefix
from polybus.model.access_rule import SUBSCRIBE
from polybus.model.commit import Commit
from polybus.model.stamp import Stamp

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.client_table import ClientEntry, ClientTable
    from polybus.dialects.pirate.server.subscription_table import (
        LastWriter,
        Subscription,
        SubscriptionTable,
    )
    from polybus.model.commit import CommitResult, RecordChange
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic

SETTINGS: Final = {KEEP: KEEP_READ, WITH_SUBSCRIBERS: True}


class SubscribeHandler:
    """Executes SUB and UNSUB."""

    def __init__(
        self,
        context: SubscriberContext,
        clients: ClientTable,
        table: SubscriptionTable,
        lasts: LastWriter,
    ) -> None:
        self._context = context
        self._clients = clients
        self._table = table
        self._lasts = lasts
        # Topics in removal, each with the requests that wait for its name.
        self._topics_in_removal: dict[int, list[Callable[[], None]]] = {}

    def is_in_removal(self, topic: Topic) -> bool:
        return topic.number in self._topics_in_removal

    # --- SUB

    def subscribe(
        self, client: ClientEntry, request: Request, caller: Identity, then: OnResult
    ) -> None:
        if not self._answer_if_used(client, request, then):
            self._find_topic(client, request, caller, then)

    def _find_topic(
        self, client: ClientEntry, request: Request, caller: Identity, then: OnResult
    ) -> None:
        again = partial(self._find_topic, client, request, caller, then)
        topic = self._context.durable.find(request.topic)
        if topic is not None and topic.number in self._topics_in_removal:
            self._topics_in_removal[topic.number].append(again)
            return
        try:
            if self._context.policy.has_rules_for(SUBSCRIBE):
                self._context.binding.check_allowed(caller, SUBSCRIBE, request.topic)
            if topic is None:
                failed = partial(self._finish, client, then)
                self._create_topic(caller, request.topic, again, failed)
                return
        except (Denied, WrongKind) as error:
            self._commit_counter(client, request, subscriber_records.encode_refusal(error), then)
        except PolybusError as error:
            self._finish(client, then, error)
        else:
            self._add_subscription(client, request, caller, topic, then)

    def _create_topic(
        self, caller: Identity, name: str, again: Callable[[], None], failed: OnResult
    ) -> None:
        """Create the topic, or wait for its creation, and call `again`."""
        found, mine = self._context.binding.reserve(caller, name)
        if not isinstance(found, NameReservation):
            again()
        elif mine:
            store = self._context.durable.store
            settings = {**SETTINGS, CREATOR: creator_record(caller)}

            def make() -> tuple[Topic, int]:
                topic = store.create(name, 1, settings)
                return topic, store.bounds(topic.number).next_id

            self._context.workers(
                make, lambda future: self._on_topic_created(found, future, again, failed)
            )
        else:
            found.outcome.add_done_callback(lambda _: self._context.run_on_loop(again))

    def _on_topic_created(
        self,
        reservation: NameReservation,
        future: Future[tuple[Topic, int]],
        again: Callable[[], None],
        failed: OnResult,
    ) -> None:
        error = error_from_future(future)
        if error is None:
            self._context.binding.complete(reservation, *future.result())
            again()
        else:
            self._context.binding.abort(reservation, error)
            failed(error)

    def _add_subscription(
        self, client: ClientEntry, request: Request, caller: Identity, topic: Topic, then: OnResult
    ) -> None:
        found = self._table.find(topic.number, client.id)
        if found is not None:
            found.seen_s = self._context.clock()
            self._commit_counter(
                client, request, subscriber_records.encode_number(found.last), then
            )
            return
        newest = self._context.durable.next_id(topic) - 1
        place = SubscriptionKey(topic.number, client.id)
        try:
            # In the table before the commit, so that retention keeps all messages after `newest`.
            new = self._table.add(place, caller.name, newest, self._context.clock())
        except PolybusError as error:
            self._finish(client, then, error)
            return
        changes = subscriber_records.subscribe_changes(place, caller.name, newest)

        def entered(error: PolybusError | None) -> None:
            if error is not None:
                self._table.remove(new)
            elif self._context.durable.find_by_number(topic.number) is None:
                self.remove_records(topic)  # dropped while the commit was in flight

        self._commit_counter(
            client, request, subscriber_records.encode_number(newest), then, changes, entered
        )

    # --- UNSUB

    def unsubscribe(self, client: ClientEntry, request: Request, then: OnResult) -> None:
        if self._answer_if_used(client, request, then):
            return
        topic = self._context.durable.find(request.topic)
        found = self._table.find(topic.number, client.id) if topic else None
        if topic is None or found is None:
            self._commit_counter(client, request, subscriber_records.encode_number(0), then)
            return

        def left(error: PolybusError | None) -> None:
            if error is None:
                self._on_unsubscribed(topic, found)

        changes = subscriber_records.unsubscribe_changes(found.place)
        self._commit_counter(
            client, request, subscriber_records.encode_number(1), then, changes, left
        )

    def drop(self, client: ClientEntry, gone: Sequence[Subscription], then: OnResult) -> None:
        """Drop subscriptions without their client (exclusive).

        Calls `then` with the first error, or None.
        """
        here = [one for one in gone if self._table.find(*one.place) is one]
        left = dict.fromkeys(here)
        errors: list[PolybusError] = []

        def dropped(one: Subscription, future: Future[CommitResult]) -> None:
            error = error_from_future(future)
            topic = self._context.durable.find_by_number(one.place.topic)
            if error is not None:
                errors.append(error)
            elif topic is not None:
                self._on_unsubscribed(topic, one)
            del left[one]
            if not left:
                self._finish(client, then, errors[0] if errors else None)

        if not here:
            self._finish(client, then, None)
        self._lasts.flush()
        for one in here:
            self._context.commit(
                Commit(changes=subscriber_records.unsubscribe_changes(one.place)),
                partial(dropped, one),
            )

    def _on_unsubscribed(self, topic: Topic, gone: Subscription) -> None:
        self._table.remove(gone)
        self.remove_unused(topic)

    # --- topics that go with their last subscriber

    def remove_unused(self, topic: Topic) -> None:
        """Remove a topic that SUB created and that has no reader left."""
        if not topic.settings.get(WITH_SUBSCRIBERS) or self._table.has(topic.number):
            return
        if topic.number in self._topics_in_removal or not self._context.binding.claim_unused(topic):
            return
        self._topics_in_removal[topic.number] = []
        self._context.workers(
            lambda: self._drop_topic(topic), lambda future: self._on_topic_removed(topic, future)
        )

    def _drop_topic(self, topic: Topic) -> bool:
        """Drop the topic. Returns False if a group reads it. Runs on a worker."""
        store = self._context.durable.store
        if store.scan(roster_prefix(topic.number), limit=1):
            return False
        store.drop(topic.name)
        query_progress.delete_query_progress(store, topic.number)
        return True

    def _on_topic_removed(self, topic: Topic, future: Future[bool]) -> None:
        self._context.binding.release(topic)
        error = error_from_future(future)
        waiting = self._topics_in_removal.pop(topic.number)
        if error is not None:
            if (
                not future.cancelled()
            ):  # cancelled: the bus stops, and the next start removes the topic
                self._context.log.warning("topic not removed", topic=topic.name, reason=str(error))
        elif future.result():
            self._context.binding.remove(topic)
        for again in waiting:
            again()

    def on_topic_dropped(self, topic: Topic) -> None:
        """Remove the subscriptions of a dropped topic."""
        if self._table.drop(topic.number):
            self.remove_records(topic)

    def remove_records(self, topic: Topic) -> None:
        self.remove_records_of(topic.number)

    def remove_records_of(self, number: int) -> None:
        """Remove the subscription records of a dropped topic."""
        store = self._context.durable.store
        self._context.workers(
            lambda: subscriber_records.remove_topic_records(store, number), self._on_records_removed
        )

    def _on_records_removed(self, future: Future[None]) -> None:
        error = error_from_future(future)
        if error is not None:  # the next start tries again
            self._context.log.warning("records not removed", reason=str(error))

    # --- stamped commits

    def _answer_if_used(self, client: ClientEntry, request: Request, then: OnResult) -> bool:
        """Answer a fenced request or a used counter. Returns False for any other request."""
        if client.is_fenced(request):
            self._finish(client, then, client.fenced_error(request))
            return True
        if request.counter > client.counter:
            return False
        self._commit_counter(client, request, subscriber_records.encode_refusal(Stale(STALE)), then)
        return True

    def _commit_counter(
        self,
        client: ClientEntry,
        request: Request,
        note: bytes,
        then: OnResult,
        changes: tuple[RecordChange, ...] = (),
        after: Callable[[PolybusError | None], None] = lambda error: None,
    ) -> None:
        """Commit counter, answer and changes. A used counter gets its stored answer."""
        stamp = Stamp(client.producer, request.epoch, request.counter, request_digest(request))

        def done(future: Future[CommitResult]) -> None:
            error = error_from_future(future)
            after(error)
            if error is None:
                client.counter = max(client.counter, request.counter)
            if isinstance(error, Stale):
                error = Stale(STALE)
            self._finish(client, then, error or subscriber_records.decode_outcome(future.result()))

        self._lasts.flush()  # positions that were read earlier are committed earlier
        self._context.commit(Commit(changes=changes, stamp=stamp, note=note), done)

    def _finish(
        self, client: ClientEntry, then: OnResult, answer: int | PolybusError | None
    ) -> None:
        then(answer)
        self._clients.finish_exclusive(client)
