"""Our client as a `RequestClient`: its errors become the answers of the bus.

A request whose outcome is unknown is resumed until it is known, as a user must do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from polybus.dialects.pirate.client import pirate_blocking
from polybus.dialects.pirate.client.pirate_blocking import BlockingClient
from polybus.dialects.pirate.client.pirate_options import Order
from polybus.dialects.pirate.client.requester import Message
from polybus.errors import DoesNotExist, NotConnected, OutcomeUnknown, PolybusError
from tests.rig.pirate.wire import NONE, Answer, error

T = TypeVar("T")

QUICK: dict[str, Any] = {"timeout_s": 0.15, "tries": 2, "jitter_s": 0.01}


class Ours:
    """`order` is that of all its GETs."""

    def __init__(
        self,
        endpoint: str,
        state: Path,
        order: Order = Order.RECORD_THEN_DELIVER,
        **options: Any,
    ) -> None:
        self._order = order
        self._message: Message | None = None

        def opened() -> BlockingClient:
            client = pirate_blocking.connect(endpoint, state=state, **QUICK | options)
            client.open()
            return client

        self.client = _patiently(opened)

    def close(self) -> None:
        self.client.close()

    def mark(self) -> dict[str, Any]:
        return {"counter": self.client.counter}

    def wake(self) -> dict[str, Any]:
        """Return the outcome of the last counted request before the restart."""
        self._resumed()
        outcome = self.client.outcome
        if outcome is None:
            return {"counter": 0}
        return {"counter": outcome.counter, "value": outcome.value, "error": outcome.error}

    def put(self, topic: str, body: bytes) -> Answer:
        return self._counted(lambda: self.client.put(topic, body))

    def sub(self, topic: str) -> Answer:
        return self._counted(lambda: self.client.subscribe(topic))

    def unsub(self, topic: str) -> Answer:
        return self._counted(lambda: int(self.client.unsubscribe(topic)))

    def get(self, topic: str) -> Answer:
        try:
            message = _patiently(lambda: self.client.get(topic, order=self._order))
        except PolybusError as refused:
            return error(_code(refused))
        self._message = message
        return NONE if message is None else ("MSG", message.id, message.body)

    def delivered(self) -> None:
        if self._order is Order.DELIVER_THEN_RECORD and self._message is not None:
            self.client.record(self._message)

    def _counted(self, ask: Callable[[], int]) -> Answer:
        try:
            return ("OK", ask())
        except OutcomeUnknown:
            return self._resumed()
        except PolybusError as refused:
            return error(_code(refused))

    def _resumed(self) -> Answer:
        while True:
            try:
                outcome = self.client.resume()
            except OutcomeUnknown:
                continue
            except PolybusError as refused:
                return error(_code(refused))
            if outcome is None:
                return error("NOTHING_TO_RESUME")
            return ("OK", outcome.value) if outcome.value is not None else error(outcome.error)


def _code(refused: PolybusError) -> str:
    return "NO_TOPIC" if isinstance(refused, DoesNotExist) else refused.code.upper()


def _patiently(do: Callable[[], T]) -> T:
    """Retry without limit: a bus that was killed is started again."""
    while True:
        try:
            return do()
        except NotConnected:
            continue
