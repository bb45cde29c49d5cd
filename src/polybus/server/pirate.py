"""Pirate's part of a running bus: one ZeroMQ context, one session, its listeners."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import zmq

from polybus.dialects.pirate.session import PirateSession
from polybus.transports.zmq.listener import RouterListener
from polybus.transports.zmq.watching import Bounds

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.subscribers.subscribers import Subscribers
    from polybus.model.address import Address
    from polybus.server.settings import Settings
    from polybus.transports.stream import Gate


class PirateSide:
    def __init__(
        self, broker: Broker, subscribers: Subscribers, settings: Settings, gate: Gate, log: Any
    ) -> None:
        assert broker.durable is not None
        self._broker = broker
        self._settings = settings
        self._gate = gate
        self._log = log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._session = PirateSession(subscribers, broker.counters, broker.durable.traffic)
        self._listeners: list[RouterListener] = []
        broker.on_tick.append(self._tick)

    def listen(self, address: Address) -> RouterListener:
        listener = RouterListener(
            self._context,
            address,
            self._session,
            self._gate,
            self._bounds(),
            time.monotonic,
            self._broker.counters.count,
            self._log,
        )
        self._listeners.append(listener)
        return listener

    def _bounds(self) -> Bounds:
        own, all_of_them = self._settings.pirate, self._settings.limits
        return Bounds(
            own.max_unfinished_bytes,
            own.max_unread_bytes,
            all_of_them.slow_consumer_timeout_s,
            all_of_them.slow_consumer_min_bytes_per_s,
        )

    async def close(self) -> None:
        """Behind its listeners: what is still to be sent has a moment left."""
        await asyncio.to_thread(self._context.destroy, None)

    def _tick(self, _now_s: float) -> None:
        for listener in self._listeners:
            listener.connections.tick()
