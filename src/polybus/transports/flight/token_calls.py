"""Running calls that have a token. They end once it is removed or has expired.

Reads and waits end themselves, because they check their token. A put ends at its next message:
gRPC has no way to end it before. A call that is still open after GRACE_S, such as an idle put,
loses its connection, and the client finds out when it connects again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from polybus.transports.flight.flight_status import Unauthenticated, to_flight_status

if TYPE_CHECKING:
    from polybus.kernel.flight_port import FlightCall
    from polybus.transports.flight.authentication import Token, TokenFile

# With the interval of `tick`, less than a second from the loss of a token to the end of its calls.
GRACE_S = 0.4


@dataclass(slots=True)
class TokenCall:
    """A running call and its token. `refused_s`: when its token was found invalid."""

    call: FlightCall
    token: Token
    refused_s: float | None = None


class TokenCalls:
    def __init__(self, tokens: TokenFile, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._lock = Lock()
        self._calls: dict[FlightCall, TokenCall] = {}

    def add(self, call: FlightCall) -> Token:
        """Return the token of a call. Raises `Unauthenticated` if it is invalid."""
        assert call.authorization is not None
        token = self._tokens.find(call.authorization)
        with self._lock:
            self._calls[call] = TokenCall(call, token)
        return token

    def check(self, call: FlightCall) -> None:
        """Raise `Unauthenticated` if the token of a running call has become invalid."""
        entry = self._calls.get(call)
        if entry is not None:
            self._tokens.check(entry.token)

    def is_valid(self, call: FlightCall) -> bool:
        try:
            self.check(call)
        except Unauthenticated:
            return False
        return True

    def tick(self, cut: Callable[[str], None]) -> None:
        """End calls whose token has become invalid; `cut` ends the connection of a peer."""
        now_s = self._clock()
        with self._lock:
            for call in [call for call in self._calls if call.is_cancelled()]:
                del self._calls[call]
            entries = list(self._calls.values())
        for entry in entries:
            try:
                self._tokens.check(entry.token)
            except Unauthenticated as error:
                if entry.refused_s is None:
                    code, text, extra = to_flight_status(error)
                    entry.call.refuse(code, text.encode(), extra)
                    entry.refused_s = now_s
                elif now_s - entry.refused_s >= GRACE_S:
                    cut(entry.call.peer)
