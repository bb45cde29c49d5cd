"""Action `query.progress`: a Spark query reports how far it has read a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.durable.query_progress import store_query_progress
from polybus.errors import MalformedRequest
from polybus.model.access_rule import SUBSCRIBE
from polybus.native.protocol.fields import is_count, parse_shard_number
from polybus.native.protocol.requests import QueryProgress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polybus.model.topic import Topic
    from polybus.native.port.actions import Handlers
    from polybus.native.port.native_port import Caller, NativePort
    from polybus.native.protocol.answers import Empty

MAX_TEXT = 128  # characters of an id or a name


def _progress(port: NativePort, caller: Caller, request: QueryProgress) -> Empty:
    topic = port.access.get_topic(caller.identity, SUBSCRIBE, request.topic)
    for field, text in (("query", request.query), ("name", request.name)):
        if len(text) > MAX_TEXT or not text.isprintable():
            raise MalformedRequest(f"{field} must be printable, at most {MAX_TEXT} characters")
    if not request.query:
        raise MalformedRequest("query must not be empty")
    offsets = _check_offsets(request.offsets, topic)
    store_query_progress(
        port.store, topic.number, request.query, request.name, offsets, port.wall_ns()
    )
    return {}


def _check_offsets(offsets: Mapping[str, object], topic: Topic) -> dict[str, int]:
    checked = {}
    for text, offset in offsets.items():
        shard = parse_shard_number(text, "offsets")
        if shard not in topic.shards:
            raise MalformedRequest(f"topic {topic.name} has no shard {shard}")
        if not (isinstance(offset, int) and is_count(offset)):
            raise MalformedRequest('offsets must be {"SHARD": OFFSET, …}, each offset >= 0')
        checked[str(shard)] = offset
    return checked


ACTIONS: Handlers = {QueryProgress: _progress}
