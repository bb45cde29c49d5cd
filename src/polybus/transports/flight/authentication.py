"""Identity of a caller: a token or a certificate if given, else the user of a loopback peer.

An invalid or expired token is an error, not an anonymous call. Tokens are lines of a file
that only its owner may read, `NAME TOKEN [EXPIRES]`, with times such as 2027-01-31T12:00:00Z.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import unquote

from polybus.errors import ConfigError
from polybus.model.identity import ANONYMOUS, Identity
from polybus.transports.flight.flight_status import Unauthenticated
from polybus.transports.peer_identity import is_loopback, open_socket_table
from polybus.transports.proc_net_table import packed
from polybus.transports.socket_table import SocketEnd

if TYPE_CHECKING:
    from polybus.kernel.flight_port import FlightCall
    from polybus.transports.flight.token_calls import TokenCalls

BEARER = "bearer"  # in any case (RFC 7235)
MIN_TOKEN_CHARACTERS = 16  # shorter tokens could be guessed
MAX_TOKENS_CHARACTERS = 1 << 20  # each call is compared with all tokens


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    secret: bytes
    expires_s: float | None


class TokenFile:
    """The tokens of a file; empty without a file."""

    def __init__(self, path: Path | None, wall_s: Callable[[], float]) -> None:
        self._path = path
        self._wall_s = wall_s
        self._tokens: dict[tuple[str, bytes], Token] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again. Raises `ConfigError` if it is invalid and keeps the old tokens."""
        if self._path is not None:
            self._tokens = {(token.name, token.secret): token for token in _read(self._path)}

    def find(self, header: str) -> Token:
        """Return the token of an `authorization` header; raise `Unauthenticated` if invalid."""
        scheme, _, text = header.partition(" ")
        if scheme.lower() != BEARER:
            raise Unauthenticated("authorization is 'Bearer TOKEN'")
        secret = text.encode("utf-8", "surrogateescape")
        # Compare with all tokens, so that the time reveals nothing.
        known = self._tokens.values()
        tokens = [token for token in known if hmac.compare_digest(token.secret, secret)]
        if not tokens:
            raise Unauthenticated("this token is not known here")
        self._check_expiry(tokens[0])
        return tokens[0]

    def check(self, token: Token) -> None:
        """Raise `Unauthenticated` if a token was removed since it was found, or has expired."""
        current = self._tokens.get((token.name, token.secret))
        if current is None:
            raise Unauthenticated("this token was removed")
        self._check_expiry(current)

    def _check_expiry(self, token: Token) -> None:
        if token.expires_s is not None and token.expires_s <= self._wall_s():
            raise Unauthenticated("this token has expired")


def _read(path: Path) -> tuple[Token, ...]:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_TOKENS_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"tokens {path}: cannot be read: {reason}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"tokens {path}: others may read it: chmod 600 {path}")
    lines = enumerate(text.splitlines(), 1)
    return tuple(_token(path, n, line) for n, line in lines if line.strip() and line[0] != "#")


def _token(path: Path, number: int, line: str) -> Token:
    words = line.split()
    expires_s = None
    try:
        name, secret, *expires = words
        if expires:
            (text,) = expires
            moment = datetime.fromisoformat(text)
            expires_s = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except ValueError:
        words_wanted = "NAME TOKEN [EXPIRES, as in 2027-01-31T12:00:00Z]"
        raise ConfigError(f"tokens {path}, line {number}: write {words_wanted}") from None
    if len(secret) < MIN_TOKEN_CHARACTERS:
        least = f"at least {MIN_TOKEN_CHARACTERS} characters"
        raise ConfigError(f"tokens {path}, line {number}: a token has {least}")
    return Token(name, secret.encode(), expires_s)


class CallIdentifier:
    """Identifies the callers of a listener at `host`:`port`."""

    def __init__(self, host: str, token_calls: TokenCalls, *, require_token: bool = False) -> None:
        self._host = host
        self._token_calls = token_calls
        self._require_token = require_token
        self._table = open_socket_table()
        self._lock = Lock()  # the socket table is not thread-safe

    def identify(self, call: FlightCall, port: int) -> Identity:
        if call.authorization is not None:
            return Identity(key=self._token_calls.add(call).name)
        if self._require_token:
            raise Unauthenticated("a call must have a token: authorization: Bearer TOKEN")
        if call.identity:
            return Identity(key=call.identity.decode("utf-8", "replace"))
        uid = self._uid(call.peer, port)
        if uid is None or call.is_cancelled():  # then another process may have the port
            return ANONYMOUS
        return Identity(uid=uid)

    def _uid(self, peer: str, port: int) -> int | None:
        far = parse_peer(peer)
        if far is None or not is_loopback(far):
            return None
        near = [SocketEnd(far.ip, port)]
        if len(far.ip) == 4 and self._host not in ("0.0.0.0", "::"):
            near.insert(
                0, SocketEnd(packed("127.0.0.1" if self._host == "localhost" else self._host), port)
            )
        with self._lock:
            for end in near:
                uid = self._table.owner(far, end)
                if uid is not None:
                    return uid
        return None


@lru_cache(4096)
def parse_peer(peer: str) -> SocketEnd | None:
    """Parse a peer of gRPC: ipv4:127.0.0.1:5000 or ipv6:[::1]:5000, perhaps escaped."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return SocketEnd(packed(host.strip("[]").removeprefix("::ffff:")), int(port))
