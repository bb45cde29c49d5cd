"""SUB and UNSUB, and topics that live as long as they have subscribers.

A new SUB makes the topic if need be, then enters the subscription with LAST at the
topic's newest id, its stamp in the same commit. While subscribed, a new SUB answers
LAST as it is. A topic made so is removed when its last subscriber has left and no
group reads it; whoever subscribes in between waits, and gets a new one, whose ids go on.

Both go alone among their client's requests, so the highest counter that is stored is
known: a request that does not go beyond it changes nothing, and is answered by the store.
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
    def __init__(
        self,
        means: SubscriberContext,
        clients: ClientTable,
        table: SubscriptionTable,
        lasts: LastWriter,
    ) -> None:
        self._means = means
        self._clients = clients
        self._table = table
        self._lasts = lasts
        # Topics that are being removed, and who waits for their names.
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
        topic = self._means.durable.find(request.topic)
        if topic is not None and topic.number in self._topics_in_removal:
            self._topics_in_removal[topic.number].append(again)
            return
        try:
            if self._means.policy.has_rules_for(SUBSCRIBE):
                self._means.binding.check_allowed(caller, SUBSCRIBE, request.topic)
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
        """Sees to it that there is such a topic, then goes on."""
        found, mine = self._means.binding.reserve(caller, name)
        if not isinstance(found, NameReservation):
            again()
        elif mine:
            store = self._means.durable.store
            settings = {**SETTINGS, CREATOR: creator_record(caller)}

            def make() -> tuple[Topic, int]:
                topic = store.create(name, 1, settings)
                return topic, store.bounds(topic.number).next_id

            self._means.workers(
                make, lambda future: self._on_topic_created(found, future, again, failed)
            )
        else:
            found.outcome.add_done_callback(lambda _: self._means.run_on_loop(again))

    def _on_topic_created(
        self,
        reservation: NameReservation,
        future: Future[tuple[Topic, int]],
        again: Callable[[], None],
        failed: OnResult,
    ) -> None:
        error = error_from_future(future)
        if error is None:
            self._means.binding.complete(reservation, *future.result())
            again()
        else:
            self._means.binding.abort(reservation, error)
            failed(error)

    def _add_subscription(
        self, client: ClientEntry, request: Request, caller: Identity, topic: Topic, then: OnResult
    ) -> None:
        found = self._table.find(topic.number, client.id)
        if found is not None:
            found.seen_s = self._means.clock()
            self._commit_counter(
                client, request, subscriber_records.encode_number(found.last), then
            )
            return
        newest = self._means.durable.next_id(topic) - 1
        place = SubscriptionKey(topic.number, client.id)
        try:
            # In the table first: nothing beyond it is collected from now on.
            new = self._table.add(place, caller.name, newest, self._means.clock())
        except PolybusError as error:
            self._finish(client, then, error)
            return
        changes = subscriber_records.subscribe_changes(place, caller.name, newest)

        def entered(error: PolybusError | None) -> None:
            if error is not None:
                self._table.remove(new)
            elif self._means.durable.find_by_number(topic.number) is None:
                self.remove_records(topic)  # it was dropped while this was on its way

        self._commit_counter(
            client, request, subscriber_records.encode_number(newest), then, changes, entered
        )

    # --- UNSUB

    def unsubscribe(self, client: ClientEntry, request: Request, then: OnResult) -> None:
        if self._answer_if_used(client, request, then):
            return
        topic = self._means.durable.find(request.topic)
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
        """Ends subscriptions without their client, which will find out; goes alone.

        Tells the first error, if there is one.
        """
        here = [one for one in gone if self._table.find(*one.place) is one]
        left = dict.fromkeys(here)
        errors: list[PolybusError] = []

        def dropped(one: Subscription, future: Future[CommitResult]) -> None:
            error = error_from_future(future)
            topic = self._means.durable.find_by_number(one.place.topic)
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
            self._means.commit(
                Commit(changes=subscriber_records.unsubscribe_changes(one.place)),
                partial(dropped, one),
            )

    def _on_unsubscribed(self, topic: Topic, gone: Subscription) -> None:
        self._table.remove(gone)
        self.remove_unused(topic)

    # --- topics that go with their last subscriber

    def remove_unused(self, topic: Topic) -> None:
        """Removes a topic if it was made by SUB, and nobody is left who reads it."""
        if not topic.settings.get(WITH_SUBSCRIBERS) or self._table.has(topic.number):
            return
        if topic.number in self._topics_in_removal or not self._means.binding.claim_unused(topic):
            return
        self._topics_in_removal[topic.number] = []
        self._means.workers(
            lambda: self._drop_topic(topic), lambda future: self._on_topic_removed(topic, future)
        )

    def _drop_topic(self, topic: Topic) -> bool:
        """On a worker; False if a group reads it."""
        store = self._means.durable.store
        if store.scan(roster_prefix(topic.number), limit=1):
            return False
        store.drop(topic.name)
        query_progress.delete_query_progress(store, topic.number)
        return True

    def _on_topic_removed(self, topic: Topic, future: Future[bool]) -> None:
        self._means.binding.release(topic)
        error = error_from_future(future)
        waiting = self._topics_in_removal.pop(topic.number)
        if error is not None:
            if not future.cancelled():  # else the bus is stopping, and the next start does it
                self._means.log.warning("topic not removed", topic=topic.name, reason=str(error))
        elif future.result():
            self._means.binding.remove(topic)
        for again in waiting:
            again()

    def on_topic_dropped(self, topic: Topic) -> None:
        """A topic was dropped, by whomever: its subscriptions have gone with it."""
        if self._table.drop(topic.number):
            self.remove_records(topic)

    def remove_records(self, topic: Topic) -> None:
        self.remove_records_of(topic.number)

    def remove_records_of(self, number: int) -> None:
        """Removes the records of a topic that is not there any more."""
        store = self._means.durable.store
        self._means.workers(
            lambda: subscriber_records.remove_topic_records(store, number), self._on_records_removed
        )

    def _on_records_removed(self, future: Future[None]) -> None:
        error = error_from_future(future)
        if error is not None:  # the next start does it
            self._means.log.warning("records not removed", reason=str(error))

    # --- what they share

    def _answer_if_used(self, client: ClientEntry, request: Request, then: OnResult) -> bool:
        """Answers what needs no look at topics: another epoch, and counters used before."""
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
        """Commits the counter, its answer and what it changes; or gets the answer of before."""
        stamp = Stamp(client.producer, request.epoch, request.counter, request_digest(request))

        def done(future: Future[CommitResult]) -> None:
            error = error_from_future(future)
            after(error)
            if error is None:
                client.counter = max(client.counter, request.counter)
            if isinstance(error, Stale):
                error = Stale(STALE)
            self._finish(client, then, error or subscriber_records.decode_outcome(future.result()))

        self._lasts.flush()  # what was read before comes before it
        self._means.commit(Commit(changes=changes, stamp=stamp, note=note), done)

    def _finish(
        self, client: ClientEntry, then: OnResult, answer: int | PolybusError | None
    ) -> None:
        then(answer)
        self._clients.finish_exclusive(client)
