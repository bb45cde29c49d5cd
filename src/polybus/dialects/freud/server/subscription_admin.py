"""Admin actions for Freud's subscriptions: list them, and remove one.

A user sees and removes its own subscriptions, an admin those of all users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.bus.dialect import ServerContext
from polybus.dialects.freud.server.ephemeral_topics import EphemeralTopics
from polybus.dialects.freud.server.pull_reader import ID_BYTES, PullReader
from polybus.model.identity import Identity

PAGE_ROWS: Final = 500  # of one answer: a few milliseconds

Answer = dict[str, Any]


class SubscriptionAdmin:
    """The verbs. The topics exist once Freud listens."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._broker = context.broker

    def verbs(self) -> Mapping[str, AdminVerb]:
        return {
            "freud_subscriptions": AdminVerb(
                self._list, for_everyone=True, keys=frozenset({"skip"})
            ),
            "freud_subscription_rm": AdminVerb(
                self._remove, for_everyone=True, keys=frozenset({"id"})
            ),
        }

    def _list(self, request: Request, caller: Identity) -> Answer:
        """Return a page of subscriptions, and how many the next page must skip."""
        skip = request.get("skip", 0)
        if type(skip) is not int or skip < 0:
            raise AdminError("bad_request", f"skip must be an integer >= 0, got {skip!r:.64}")
        rows = [
            self._describe(reader)
            for reader in islice(self._find_visible(caller), skip, skip + PAGE_ROWS)
        ]
        return {
            "subscriptions": rows,
            "next": skip + len(rows) if len(rows) == PAGE_ROWS else None,
        }

    def _remove(self, request: Request, caller: Identity) -> Answer:
        """End a subscription; a Get that waits on it is answered Doesn't Exist."""
        topics, reader_id = self._topics(), _parse_id(request.get("id"))
        reader = None if topics is None else topics.readers.by_id.get(reader_id)
        if topics is None or reader is None or not self._may_manage(caller, reader):
            raise AdminError("not_found", f"subscription {reader_id.hex()} does not exist")
        row = self._describe(reader)
        topics.unsubscribe(reader)
        self._context.log.info("subscription removed", id=reader_id.hex(), by=caller.name)
        return row

    def _find_visible(self, caller: Identity) -> Iterator[PullReader]:
        topics = self._topics()
        readers = () if topics is None else topics.readers.by_id.values()
        return (reader for reader in readers if self._may_manage(caller, reader))

    def _may_manage(self, caller: Identity, reader: PullReader) -> bool:
        own = reader.identity.account == caller.account
        return own or self._broker.policy.is_admin(caller)

    def _topics(self) -> EphemeralTopics | None:
        topics = self._broker.topics
        return topics if isinstance(topics, EphemeralTopics) else None

    def _describe(self, reader: PullReader) -> Answer:
        is_detached = not reader.is_owned and not reader.waiters
        return {
            "id": reader.id.hex(),
            "topic": reader.topic_name.decode("utf-8", "backslashreplace"),
            "user": self._broker.quotas.describe(reader.identity),
            "state": "detached" if is_detached else "attached",
            "unread_messages": reader.held_messages,
            "unread_bytes": reader.held_bytes,
            "detached_s": round(self._broker.now_s() - reader.used_s, 3) if is_detached else None,
        }


def _parse_id(text: object) -> bytes:
    try:
        reader_id = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        reader_id = b""
    if len(reader_id) != ID_BYTES:
        raise AdminError("bad_request", f"id must be {2 * ID_BYTES} hex digits, got {text!r:.64}")
    return reader_id
