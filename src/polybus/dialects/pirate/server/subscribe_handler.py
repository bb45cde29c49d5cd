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
from typing import Final

from polybus.dialects.pirate.codec import ClientRequest
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.client_table import ClientEntry, ClientTable
from polybus.dialects.pirate.server.get_handler import LastWriter
from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    SubscriberContext,
    error_from_future,
    unknown_user_error,
)
from polybus.dialects.pirate.server.subscriber_records import (
    SUBSCRIPTIONS,
    SubscriptionKey,
    encode_number,
    encode_refusal,
)
from polybus.dialects.pirate.server.subscription_table import Subscription, SubscriptionTable
from polybus.durable import query_progress
from polybus.durable.topic_names import CREATOR, NameReservation, creator_record
from polybus.durable.topic_registry import KEEP, KEEP_READ, WITH_SUBSCRIBERS
from polybus.errors import Denied, PolybusError, Stale, WrongKind
from polybus.groups.group_records import roster_prefix
from polybus.model import topic_name
from polybus.model.access_rule import SUBSCRIBE
from polybus.model.commit import Commit, CommitResult, RecordChange
from polybus.model.identity import Identity
from polybus.model.stamp import Stamp
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
        # Topics in removal, by number, each with the SUBs that wait for its name.
        self.topics_in_removal: dict[int, list[Callable[[], None]]] = {}

    # --- SUB

    def subscribe(self, request: ClientRequest, caller: Identity, then: OnResult) -> None:
        """Execute SUB (exclusive). Calls `then` with LAST or the error."""

        def run(client: ClientEntry) -> None:
            if not self._answer_if_used(client, request, then):
                self._find_topic(client, request, caller, then)

        self._clients.queue(request.client, run, then, alone=True)

    def _find_topic(
        self, client: ClientEntry, request: ClientRequest, caller: Identity, then: OnResult
    ) -> None:
        """Subscribe to the topic, after its removal or its creation if need be."""
        again = partial(self._find_topic, client, request, caller, then)
        topic = self._context.durable.find(request.topic)
        if topic is not None and topic.number in self.topics_in_removal:
            self.topics_in_removal[topic.number].append(again)
            return
        try:
            if self._context.policy.can_deny(SUBSCRIBE, request.topic.encode()):
                self._context.binding.check_allowed(caller, SUBSCRIBE, request.topic)
            if topic is None:
                failed = partial(self._finish, client, then)
                self._create_topic(caller, request.topic, again, failed)
                return
            self._context.durable.check_intact(topic)
        except (Denied, WrongKind) as error:
            if caller.is_in_doubt and isinstance(error, Denied):
                self._finish(client, then, unknown_user_error())
            else:
                self._commit_counter(client, request, encode_refusal(error), then)
        except PolybusError as error:  # a retry may succeed, so the counter is not used
            self._finish(client, then, error)
        else:
            self._add_subscription(client, request, caller, topic, then)

    def _create_topic(
        self, caller: Identity, name: str, again: Callable[[], None], failed: OnResult
    ) -> None:
        """Create the topic, or wait for its creation by another caller, and call `again`."""
        reservation, is_mine = self._context.binding.reserve(caller, name)
        if not isinstance(reservation, NameReservation):  # the topic already exists
            again()
            return
        if not is_mine:
            reservation.outcome.add_done_callback(lambda _: self._context.run_on_loop(again))
            return
        store, defaults = self._context.durable.store, self._context.durable.default_settings

        def create() -> tuple[Topic, int]:
            # Dead letters are not removed when their readers have read them, or leave.
            is_dead_letters = topic_name.dead_letter_source(name.encode()) is not None
            own = {} if is_dead_letters else {**defaults, **SETTINGS}
            settings = {**own, CREATOR: creator_record(reservation.owner)}
            topic = store.create(name, 1, settings)
            # The ids of an earlier topic with this name continue.
            return topic, store.bounds(topic.number).next_id

        def on_created(future: Future[tuple[Topic, int]]) -> None:
            error = error_from_future(future)
            if error is None:
                self._context.binding.complete(reservation, *future.result())
                again()
            else:
                self._context.binding.abort(reservation, error)
                failed(error)

        self._context.workers(create, on_created)

    def _add_subscription(
        self,
        client: ClientEntry,
        request: ClientRequest,
        caller: Identity,
        topic: Topic,
        then: OnResult,
    ) -> None:
        existing = self._table.find(topic.number, client.id)
        if existing is not None:
            existing.seen_s = self._context.clock()
            self._commit_counter(client, request, encode_number(existing.last), then)
            return
        newest = self._context.durable.next_id(topic) - 1
        key = SubscriptionKey(topic.number, client.id)
        try:
            # In the table before the commit, so that retention keeps all messages after `newest`.
            new = self._table.add(key, caller, newest, self._context.clock())
        except PolybusError as error:
            self._finish(client, then, error)
            return

        def on_committed(error: PolybusError | None) -> None:
            if error is not None:
                self._table.remove(new)
            elif self._context.durable.find_by_number(topic.number) is None:
                self.remove_records(topic.number)  # dropped while the commit was in flight

        account = caller.account_name.encode("utf-8", "backslashreplace")
        changes = (
            RecordChange(subscriber_records.record_key(SUBSCRIPTIONS, key), account),
            subscriber_records.last_change(key, newest),
        )
        self._commit_counter(client, request, encode_number(newest), then, changes, on_committed)

    # --- UNSUB

    def unsubscribe(self, request: ClientRequest, _caller: Identity, then: OnResult) -> None:
        """Execute UNSUB (exclusive). Calls `then` with 1, 0 if not subscribed, or the error."""

        def run(client: ClientEntry) -> None:
            if self._answer_if_used(client, request, then):
                return
            topic = self._context.durable.find(request.topic)
            subscription = self._table.find(topic.number, client.id) if topic else None
            if topic is None or subscription is None:
                self._commit_counter(client, request, encode_number(0), then)
                return

            def on_committed(error: PolybusError | None) -> None:
                if error is None:
                    self._table.remove(subscription)
                    self.remove_unused(topic)

            changes = subscriber_records.unsubscribe_changes(subscription.key)
            self._commit_counter(client, request, encode_number(1), then, changes, on_committed)

        self._clients.queue(request.client, run, then, alone=True)

    def drop(self, subscriptions: Sequence[Subscription], then: OnResult) -> None:
        """Drop subscriptions without their clients. Calls `then` with the list of errors."""
        by_client: dict[bytes, list[Subscription]] = {}
        for subscription in subscriptions:
            by_client.setdefault(subscription.key.client, []).append(subscription)
        left = len(by_client)
        errors: list[PolybusError] = []

        def on_client_done(error: PolybusError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                errors.append(error)
            if not left:
                then(errors)

        if not by_client:
            then(errors)
        for client_id, dropped in by_client.items():
            run = partial(self._drop_of_client, dropped, on_client_done)
            self._clients.queue(client_id, run, on_client_done, alone=True)

    def _drop_of_client(
        self, subscriptions: Sequence[Subscription], then: OnResult, client: ClientEntry
    ) -> None:
        """Drop subscriptions of one client (exclusive).

        Calls `then` with the first error, or None.
        """
        # The client may have unsubscribed, and even subscribed again, before this turn.
        present = [one for one in subscriptions if self._table.find(*one.key) is one]
        left = len(present)
        errors: list[PolybusError] = []

        def on_dropped(subscription: Subscription, future: Future[CommitResult]) -> None:
            nonlocal left
            left -= 1
            error = error_from_future(future)
            topic = self._context.durable.find_by_number(subscription.key.topic)
            if error is not None:
                errors.append(error)
            elif topic is not None:
                self._table.remove(subscription)
                self.remove_unused(topic)
            if not left:
                self._finish(client, then, errors[0] if errors else None)

        if not present:
            self._finish(client, then, None)
        self._lasts.flush()  # else LAST could be stored after its record was removed
        for subscription in present:
            changes = subscriber_records.unsubscribe_changes(subscription.key)
            self._context.commit(Commit(changes=changes), partial(on_dropped, subscription))

    # --- topics that go with their last subscriber

    def remove_unused(self, topic: Topic) -> None:
        """Remove a topic that SUB created and that has no reader left."""
        if not topic.settings.get(WITH_SUBSCRIBERS) or self._table.has(topic.number):
            return
        if topic.number in self.topics_in_removal or not self._context.binding.claim_unused(topic):
            return
        self.topics_in_removal[topic.number] = []
        store = self._context.durable.store

        def drop() -> bool:
            if store.scan(roster_prefix(topic.number), limit=1):  # a group reads it
                return False
            store.drop(topic.name)
            query_progress.delete_query_progress(store, topic.number)
            return True

        def on_dropped(future: Future[bool]) -> None:
            self._context.binding.release(topic)
            error = error_from_future(future)
            waiting = self.topics_in_removal.pop(topic.number)
            if error is None:
                if future.result():
                    self._context.binding.remove(topic)
            elif not future.cancelled():  # cancelled: the bus stops; the next start removes it
                self._context.log.warning("topic not removed", topic=topic.name, reason=str(error))
            for again in waiting:
                again()

        self._context.workers(drop, on_dropped)

    def on_topic_dropped(self, topic: Topic) -> None:
        """Remove the subscriptions of a dropped topic."""
        if self._table.drop(topic.number):
            self.remove_records(topic.number)

    def remove_records(self, topic: int) -> None:
        """Remove the subscription records of a dropped topic."""
        store = self._context.durable.store

        def on_removed(future: Future[None]) -> None:
            error = error_from_future(future)
            if error is not None:  # the next start tries again
                self._context.log.warning("records not removed", reason=str(error))

        self._context.workers(
            lambda: subscriber_records.remove_topic_records(store, topic), on_removed
        )

    # --- stamped commits

    def _answer_if_used(self, client: ClientEntry, request: ClientRequest, then: OnResult) -> bool:
        """Answer a fenced request or a used counter. Returns False for any other request."""
        if client.is_fenced(request):
            self._finish(client, then, client.fenced_error(request))
            return True
        if request.counter > client.counter:
            return False
        # The store answers a repeat by its stamp, and refuses any other as Stale.
        refusal = encode_refusal(Stale(subscriber_records.STALE))
        self._commit_counter(client, request, refusal, then)
        return True

    def _commit_counter(
        self,
        client: ClientEntry,
        request: ClientRequest,
        note: bytes,
        then: OnResult,
        changes: tuple[RecordChange, ...] = (),
        on_committed: Callable[[PolybusError | None], None] = lambda error: None,
    ) -> None:
        """Commit counter, answer and changes. A used counter gets its stored answer."""
        digest = subscriber_records.request_digest(request)
        stamp = Stamp(client.producer, request.epoch, request.counter, digest)

        def on_done(future: Future[CommitResult]) -> None:
            error = error_from_future(future)
            on_committed(error)
            if error is None:
                client.counter = max(client.counter, request.counter)
            if isinstance(error, Stale):
                error = Stale(subscriber_records.STALE)
            self._finish(client, then, error or subscriber_records.decode_outcome(future.result()))

        self._lasts.flush()  # positions that were read earlier are committed earlier
        self._context.commit(Commit(changes=changes, stamp=stamp, note=note), on_done)

    def _finish(
        self, client: ClientEntry, then: OnResult, answer: int | PolybusError | None
    ) -> None:
        then(answer)
        self._clients.finish_exclusive(client)
