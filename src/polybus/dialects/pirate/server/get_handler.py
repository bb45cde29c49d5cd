"""GET: moves LAST, writes it down, and gives the first message above it.

Sending is not reading: a message counts as read when a later GET says so. LAST never
goes back, so a GET that was under way for long, or was sent twice, does no harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.dialects.pirate.server.subscriber_context import OnResult, Request, SubscriberContext
from polybus.errors import Denied, DoesNotExist, MalformedRequest, PolybusError
from polybus.model.access_rule import SUBSCRIBE

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.client_table import ClientEntry
    from polybus.dialects.pirate.server.last_writer import LastWriter
    from polybus.dialects.pirate.server.message_cache import MessageCache
    from polybus.dialects.pirate.server.subscription_table import Subscription, SubscriptionTable
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic


class GetHandler:
    def __init__(
        self,
        means: SubscriberContext,
        table: SubscriptionTable,
        lasts: LastWriter,
        shelf: MessageCache,
    ) -> None:
        self._means = means
        self._table = table
        self._lasts = lasts
        self._shelf = shelf

    def get(self, client: ClientEntry, request: Request, caller: Identity, then: OnResult) -> None:
        if client.is_fenced(request):
            then(client.fenced_error(request))
            return
        topic = self._means.durable.find(request.topic)
        found = self._table.find(topic.number, client.id) if topic is not None else None
        if topic is None or found is None:
            then(DoesNotExist(f"not subscribed to {request.topic!r}: SUB comes first"))
            return
        newest = self._means.durable.next_id(topic) - 1
        error = self._refusal(caller, request, newest)
        if error is not None:
            then(error)
            return
        found.seen_s = self._means.clock()
        found.last = max(found.last, request.last)
        if found.saved >= found.last:
            self._answer(topic, found.last, then)
        else:
            self._save(topic, found, newest, then)

    def _save(self, topic: Topic, moved: Subscription, newest: int, then: OnResult) -> None:
        last = moved.last
        if last < newest:
            self._shelf.prefetch(topic, last)  # while LAST is written

        def saved(error: PolybusError | None) -> None:
            if error is None:
                self._answer(topic, last, then)
            else:
                then(error)

        self._lasts.save(moved, saved)

    def _answer(self, topic: Topic, last: int, then: OnResult) -> None:
        if last >= self._means.durable.next_id(topic) - 1:
            then(None)
        else:
            self._shelf.get(topic, last, then)

    def _refusal(self, caller: Identity, request: Request, newest: int) -> PolybusError | None:
        if self._means.policy.has_rules_for(SUBSCRIBE):
            try:
                self._means.binding.check_allowed(caller, SUBSCRIBE, request.topic)
            except Denied as error:
                return error
        if request.last > newest:
            return MalformedRequest(
                f"LAST is {request.last}, but the newest id of {request.topic!r} is {newest}: "
                "if the bus was restored from a backup, UNSUB and SUB again"
            )
        return None
