"""Topics of other nodes: `/net/<node id>/public/news` is subscribed like a topic of this bus.

A subscription is a call with a stream of replies. This node calls `public/gsb/channel` of the other
one with the topic's name as data. The other node decides by its rules (`subscribe`), answers with
an empty PARTIAL, and then with one PARTIAL for each message. So the way, the loss of a link, and
credit are those of every call. One stream serves all subscribers of this bus.

    subscriber ──subscribe──▶ RemoteChannel ──call──▶ ... ──▶ ChannelFeed ──subscribe──▶ topic
        ◀── broadcast_request ──        ◀── PARTIAL per message ──      ◀── broadcast ──

Delivery is at most once, as for every broadcast: a feed whose caller is too slow, and a subscriber
that is full, lose messages, which are counted. A stream that breaks is opened again, with pauses,
as long as it has subscribers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from polybus.bus.subscriptions import SubscribeResult
from polybus.dialects.gsb import codec
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.gsb_packets import RELAY_BYTES
from polybus.dialects.gsb.network.bus_pipe import BusPipe
from polybus.dialects.gsb.server.call_table import Route, Service
from polybus.dialects.gsb.server.service_registry import (
    OK_STATUS,
    PUBLIC,
    ServiceStatus,
    remote_name,
)
from polybus.dialects.gsb.service_address import PUBLIC_CHANNEL, StatusCode
from polybus.errors import InvalidTopic, LimitReached
from polybus.model import topic_name
from polybus.model.access_rule import SUBSCRIBE

if TYPE_CHECKING:
    from polybus.dialects.gsb.network.network import Network
    from polybus.dialects.gsb.server.call_table import CallingNode, OpenCall
    from polybus.dialects.gsb.server.session import GsbServer, GsbSession

FULL, PARTIAL = 0, 1
DEADLINE_S = 4_000_000.0  # of a stream, which may be silent for long
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0
CONFIRM_S = 20.0  # for the answer of the other node to a subscription
LASTING = frozenset(
    {StatusCode.UNAVAILABLE, StatusCode.DEADLINE, StatusCode.CANCELLED, StatusCode.TOO_LARGE}
)

Then = Callable[[ServiceStatus], None]


class ChannelFeed:
    """The stream of a topic of this bus to another node."""

    def __init__(self, channels: Channels, origin: CallingNode, topic: bytes) -> None:
        self._channels = channels
        self._server = channels.server
        self.node = origin.identity.node
        self.topic = topic
        self.identity = origin.identity
        timers = self._server.timers
        self._pipe = BusPipe(self.node, origin.identity, timers, self._take)
        self.session = self._server(self._pipe)
        self.session.credits = True
        self.route = Route(Service(PUBLIC_CHANNEL, self.session, 0), topic)
        self.call: OpenCall | None = None

    def subscribe(self) -> SubscribeResult:
        return self._server.broker.subscribe(self.session.connection, self.topic)

    def begin(self, call: OpenCall) -> None:
        """Confirm the subscription."""
        self.call = call
        self.session.reply(call.id, StatusCode.OK, PARTIAL, b"")

    def close(self) -> None:
        self._channels.forget_feed(self)
        self._pipe.close()
        self._server.calls.leave(self.session)
        self._server.broker.leave(self.session.connection)

    def _take(self, packet: pb.Packet) -> None:
        call = self.call
        if packet.HasField("call_request"):
            call = self.session.serving.get(packet.call_request.request_id.encode())
            if call is not None:
                self.begin(call)
        elif packet.HasField("cancel"):
            self.close()
        elif packet.HasField("broadcast_request") and call is not None:
            packet.broadcast_request.caller = ""  # users of this node mean nothing to others
            data = packet.broadcast_request.SerializeToString()
            if len(data) + RELAY_BYTES > self._server.limits.max_packet_bytes:
                self._server.broker.counters.count("dropped", "channel_too_large")
            elif call.can_forward(True):
                self.session.reply(call.id, StatusCode.OK, PARTIAL, data)
            else:
                self._server.broker.counters.count("dropped", "channel_full")


class RemoteChannel:
    """A topic of another node, and its subscribers on this bus."""

    def __init__(self, channels: Channels, node: str, topic: str) -> None:
        self._channels = channels
        self._server = channels.server
        self.node, self.topic = node, topic
        self.name = f"/net/{node}/{topic}"
        self.subscribers: dict[GsbSession, None] = {}
        self.accounts: Counter[str] = Counter()  # of the subscribers
        self._waiting: list[tuple[GsbSession, Then]] = []
        self._is_confirmed = False
        self._calls_made = 0
        self._pause_s = FIRST_PAUSE_S
        self._pipe = BusPipe(self.name, channels.identity, self._server.timers, self._take)
        self._session = self._server(self._pipe)
        self._open()

    def add(self, session: GsbSession, then: Then) -> None:
        """Add a subscriber; `then` gets the outcome once it is known."""
        if session not in self.subscribers:
            self.subscribers[session] = None
            self.accounts[session.connection.identity.account_name] += 1
        if self._is_confirmed:
            then(OK_STATUS)
        else:
            self._waiting.append((session, then))

    def remove(self, session: GsbSession) -> None:
        if session in self.subscribers:
            self._drop(session)
        ended = [then for one, then in self._waiting if one is session]
        self._waiting = [(one, then) for one, then in self._waiting if one is not session]
        for then in ended:
            then(ServiceStatus(StatusCode.CANCELLED, "unsubscribed before the node has answered"))
        if not self.subscribers:
            self.close()

    def _drop(self, session: GsbSession) -> None:
        del self.subscribers[session]
        account = session.connection.identity.account_name
        self.accounts[account] -= 1
        if not self.accounts[account]:
            del self.accounts[account]
            self._channels.shares.release(account)

    def close(self) -> None:
        self._channels.forget_channel(self)
        self._server.calls.leave(self._session)  # cancels the call
        self._pipe.close()
        self._server.broker.leave(self._session.connection)

    def _open(self) -> None:
        if self._pipe.is_closed:
            return
        link = self._server.network.route(self.node)
        if isinstance(link, ServiceStatus):
            self._server.timers.call_soon(lambda: self._on_end(link))
            return
        self._calls_made += 1
        route, data = Route(link, PUBLIC_CHANNEL.encode()), self.topic.encode()
        request_id = b"%d" % self._calls_made
        self._session.open_call(route, request_id, data, DEADLINE_S)
        if not self._is_confirmed:
            self._server.timers.call_later(CONFIRM_S, self._check_confirmed)

    def _check_confirmed(self) -> None:
        if not self._is_confirmed:
            status = ServiceStatus(StatusCode.DEADLINE, "the other node does not answer")
            self._on_end(status)

    def _take(self, packet: pb.Packet) -> None:
        reply = packet.call_reply
        if reply.type == FULL:
            self._on_end(self._channels.read_failure(reply.data))
        elif reply.data:
            try:
                message = pb.BroadcastRequest.FromString(reply.data)
            except DecodeError:
                self._server.broker.counters.count("dropped", "bad_channel_message")
                return
            for session in list(self.subscribers):
                if session.full:
                    self._server.broker.counters.count("dropped", "subscriber_full")
                else:
                    session.send_broadcast(self.name, message.data, self.node)
        else:
            self._is_confirmed, self._pause_s = True, FIRST_PAUSE_S
            self._answer(OK_STATUS)

    def _on_end(self, status: ServiceStatus) -> None:
        """Open the stream again if it was confirmed before and may work again."""
        if self._pipe.is_closed:
            return
        if self._is_confirmed and status.code in LASTING:
            pause_s = self._pause_s * (0.5 + random.random() / 2)
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            self._server.timers.call_later(pause_s, self._open)
            return
        if self._is_confirmed:
            counters = self._server.broker.counters
            counters.count("dropped", "channel_ended", len(self.subscribers))
        for session in list(self.subscribers):
            session.channels.discard((self.node, self.topic))
            self._drop(session)
        self._answer(status)
        self.close()

    def _answer(self, status: ServiceStatus) -> None:
        waiting, self._waiting = self._waiting, []
        for _, then in waiting:
            then(status)


class Channels:
    """The channels of a bus, in both directions."""

    def __init__(self, server: GsbServer, network: Network) -> None:
        self.server = server
        self._remote: dict[tuple[str, str], RemoteChannel] = {}
        self._feeds: dict[ChannelFeed, None] = {}
        broker, limits = server.broker, server.limits
        # Topics of other nodes, by the accounts of their subscribers; topics of this bus, by node.
        table = partial(
            broker.shares.new_table,
            "max_channels",
            limits.max_channels,
            partial(broker.counters.count, "refused"),
        )
        self.shares = table()
        self._feed_shares = table(user_limit=("max_node_channels", limits.max_node_channels))
        self.identity = server.owner
        self.node_id = network.node_id
        server.broker.policy.on_change(self._end_denied)

    # --- topics of other nodes

    def subscribe(self, session: GsbSession, node: str, topic: str, then: Then) -> None:
        """Subscribe a connection; `then` gets the outcome, at once or later."""
        broker, name = self.server.broker, remote_name(node, topic)

        def refuse(reason: str, text: str) -> None:
            broker.count_refusal(session.connection, reason, name)
            then(ServiceStatus(StatusCode.DENIED, text))

        if not broker.policy.allows(session.connection.pipe.identity, SUBSCRIBE, name):
            text = f"not allowed to subscribe to '/net/{node}/{topic}'"
            refuse("subscribe_denied", text)
            return
        limit, is_new = "max_subscriptions_per_connection", (node, topic) not in session.channels
        if is_new and len(session.channels) >= broker.limits.max_subscriptions_per_connection:
            refuse(limit, f"{limit} is reached")
            return
        channel, identity = self._remote.get((node, topic)), session.connection.identity
        if is_new and (channel is None or not channel.accounts[identity.account_name]):
            try:
                self.shares.take(identity)
            except LimitReached as error:
                then(ServiceStatus(StatusCode.DENIED, str(error)))
                return
        if channel is None:
            channel = self._remote[node, topic] = RemoteChannel(self, node, topic)
        session.channels.add((node, topic))
        channel.add(session, then)

    def unsubscribe(self, session: GsbSession, node: str, topic: str) -> bool:
        """Returns False if the connection has no such subscription."""
        if (node, topic) not in session.channels:
            return False
        session.channels.discard((node, topic))
        if (channel := self._remote.get((node, topic))) is not None:
            channel.remove(session)
        return True

    def leave(self, session: GsbSession) -> None:
        for node, topic in list(session.channels):
            self.unsubscribe(session, node, topic)

    def forget_channel(self, channel: RemoteChannel) -> None:
        key = channel.node, channel.topic
        if self._remote.get(key) is channel:
            del self._remote[key]

    def read_failure(self, data: bytes) -> ServiceStatus:
        """Return the failure with which the other node, or the way to it, has ended a stream."""
        try:
            failure = codec.unpack(data)
            return ServiceStatus(StatusCode(failure["code"]), str(failure["message"])[:500])
        except (ValueError, KeyError, TypeError):
            return ServiceStatus(StatusCode.UNAVAILABLE, "the other node has ended the stream")

    # --- topics of this bus

    def open_feed(self, origin: CallingNode, data: bytes) -> ChannelFeed | ServiceStatus:
        """Subscribe another node to a topic of this bus, or return the refusal."""
        broker = self.server.broker
        try:
            topic = topic_name.check_topic_name(data.decode())
        except (InvalidTopic, UnicodeDecodeError) as error:
            return ServiceStatus(StatusCode.BAD_REQUEST, str(error))
        if not topic.startswith(PUBLIC.encode()):
            return ServiceStatus(StatusCode.NOT_FOUND, "only topics under public/ can be read")
        if not broker.policy.allows(origin.identity, SUBSCRIBE, topic):
            broker.counters.count("refused", "network_subscribe_denied")
            return ServiceStatus(
                StatusCode.DENIED, f"not allowed to subscribe to {data.decode()!r}"
            )
        try:
            self._feed_shares.take(origin.identity)
        except LimitReached as error:
            return ServiceStatus(StatusCode.UNAVAILABLE, str(error))
        feed = ChannelFeed(self, origin, topic)
        result = feed.subscribe()
        self._feeds[feed] = None
        if result is not SubscribeResult.NEW:
            feed.close()
            return ServiceStatus(StatusCode.DENIED, f"cannot subscribe: {result.value}")
        return feed

    def forget_feed(self, feed: ChannelFeed) -> None:
        if self._feeds.pop(feed, 0) is None:
            self._feed_shares.release(feed.identity.account_name)

    def _end_denied(self) -> None:
        """End the streams and the subscriptions that the rules no longer allow."""
        allows = self.server.broker.policy.allows
        for channel in list(self._remote.values()):
            name = remote_name(channel.node, channel.topic)
            for session in list(channel.subscribers):
                if not allows(session.connection.pipe.identity, SUBSCRIBE, name):
                    self.unsubscribe(session, channel.node, channel.topic)
        for feed in list(self._feeds):
            if feed.call is not None and not allows(feed.identity, SUBSCRIBE, feed.topic):
                text = "not allowed to subscribe any longer"
                self.server.calls.fail(feed.call, StatusCode.DENIED, text, cancel=True)
