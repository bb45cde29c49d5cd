"""The verbs as the compiled port calls them."""

from __future__ import annotations

from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pyarrow.flight as flight

from polybus.kernel.flight_port import BatchQueue, FlightPort
from polybus.model.identity import ANONYMOUS
from polybus.model.limits import NativeLimits
from polybus.transports.flight import flight_handler
from polybus.transports.flight.authentication import TokenFile
from polybus.transports.flight.call_tracker import CallTracker
from polybus.transports.flight.token_calls import TokenCalls

PATIENCE_S = 60


def test_call_during_opening_is_answered(monkeypatch):
    """A client whose bus was killed is there before the next one knows its own port."""
    calls, found, seen, waiting = CallTracker(), [], [], Event()

    def ask(port: int) -> None:
        with flight.connect(f"grpc://127.0.0.1:{port}") as client:
            options = flight.FlightCallOptions(timeout=PATIENCE_S)
            found.extend(one.body.to_pybytes() for one in client.do_action("any", options))

    class OpenedEvent(Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    def opened(*given: Any, **more: Any) -> FlightPort:
        port = FlightPort(*given, **more)
        asking = Thread(target=ask, args=(port.port,))
        asking.start()
        assert waiting.wait(PATIENCE_S), "the call waits for the port"
        seen.append(asking)
        return port

    monkeypatch.setattr(flight_handler, "FlightPort", opened)
    monkeypatch.setattr(flight_handler, "Event", OpenedEvent)
    verbs: Any = SimpleNamespace(
        begin_call=lambda identity: None,
        end_call=lambda identity: None,
        new_caller=lambda *who: who,
        act=lambda *asked: {},
        is_streamed=lambda name: False,
    )
    service = flight_handler.FlightHandler(
        "grpc://127.0.0.1:0",
        verbs,
        NativeLimits(),
        calls,
        BatchQueue(),
        lambda call, port: ANONYMOUS,
        TokenCalls(TokenFile(None, lambda: 0.0), lambda: 0.0),
        on_error=lambda error: None,
        on_resets=lambda peer: None,
    )
    seen[0].join(PATIENCE_S)
    service.shutdown()
    assert found == [b"{}"]
