"""Identity of a caller: a token or a certificate if given, else the user of a local peer.

A local peer whose user the kernel does not know is in doubt, any other one is anonymous.

An invalid or expired token is an error, not an anonymous call. Tokens are lines of a file
that only its owner may read, `NAME TOKEN [EXPIRES]`, with times such as 2027-01-31T12:00:00Z.
"""

from __future__ import annotations

import hmac
import os
import socket
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
from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from polybus.transports.flight.flight_status import Unauthenticated
from polybus.transports.peer_identity import is_own_address, open_socket_table
from polybus.transports.proc_net_table import packed
from polybus.transports.socket_table import SocketEnd

if TYPE_CHECKING:
    from polybus.kernel.flight_port import FlightCall

BEARER = "bearer"  # in any case (RFC 7235)
ANY_HOST = ("0.0.0.0", "::")
LOOPBACK = (packed("127.0.0.1"), packed("::1"))
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
    """Identifies the callers of a listener at `host`:`port`.

    `on_in_doubt` is called for each call whose caller is in doubt.
    """

    def __init__(
        self,
        host: str,
        tokens: TokenFile,
        on_in_doubt: Callable[[], None],
        *,
        require_token: bool = False,
    ) -> None:
        self._own_ips = _own_ips(host)  # empty: the listener has all addresses of this machine
        self._on_in_doubt = on_in_doubt
        self._tokens = tokens
        self._require_token = require_token
        self._table = open_socket_table()
        self._lock = Lock()  # the socket table is not thread-safe

    def identify(self, call: FlightCall, port: int) -> Identity:
        if call.authorization is not None:
            return Identity(key=self._tokens.find(call.authorization).name)
        if self._require_token:
            raise Unauthenticated("a call must have a token: authorization: Bearer TOKEN")
        if call.identity:
            return Identity(key=call.identity.decode("utf-8", "replace"))
        far = parse_peer(call.peer)
        if far is not None and not is_own_address(far.ip):
            return ANONYMOUS
        uid = None if far is None else self._find_owner(far, port)
        if uid is None or call.is_cancelled():  # then another process may have the port
            self._on_in_doubt()
            return IN_DOUBT
        return Identity(uid=uid)

    def _find_owner(self, far: SocketEnd, port: int) -> int | None:
        # gRPC does not report our end of the connection, so try those that a peer may use.
        for ip in self._own_ips or (far.ip, *LOOPBACK):
            if len(ip) == len(far.ip):
                with self._lock:
                    uid = self._table.owner(far, SocketEnd(ip, port))
                if uid is not None:
                    return uid
        return None


def _own_ips(host: str) -> tuple[bytes, ...]:
    if host in ANY_HOST:
        return ()
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(packed(str(address[0])) for *_, address in found))


@lru_cache(4096)
def parse_peer(peer: str) -> SocketEnd | None:
    """Parse a peer of gRPC: ipv4:127.0.0.1:5000 or ipv6:[::1]:5000, perhaps escaped."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return SocketEnd(packed(host.strip("[]").removeprefix("::ffff:")), int(port))
