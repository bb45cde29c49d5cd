"""Identity of a caller: a token if given, else the identity of its connection.

That is the name in a certificate if given, else the user of a local client, as the listener
found it when the connection began. A caller whose connection has ended is in doubt.

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
from pathlib import Path
from typing import TYPE_CHECKING

from polybus.errors import ConfigError
from polybus.model.identity import IN_DOUBT, Identity
from polybus.transports.flight.flight_status import Unauthenticated

if TYPE_CHECKING:
    from polybus.kernel.flight_port import FlightCall

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
            text = file.read(MAX_TOKENS_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"tokens {path}: cannot be read: {reason}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"tokens {path}: others may read it: chmod 600 {path}")
    if len(text) > MAX_TOKENS_CHARACTERS:
        most = f"at most {MAX_TOKENS_CHARACTERS} characters"
        raise ConfigError(f"tokens {path}: must have {most}; remove tokens that have expired")
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
    """`find` returns the identity of a call's connection, None if it has ended.

    `on_in_doubt` is called for each call whose caller is in doubt.
    """

    def __init__(
        self,
        tokens: TokenFile,
        find: Callable[[FlightCall], Identity | None],
        on_in_doubt: Callable[[], None],
        *,
        require_token: bool = False,
    ) -> None:
        self._tokens = tokens
        self._find = find
        self._on_in_doubt = on_in_doubt
        self._require_token = require_token

    def identify(self, call: FlightCall) -> Identity:
        if call.authorization is not None:
            return Identity(key=self._tokens.find(call.authorization).name)
        if self._require_token:
            raise Unauthenticated("a call must have a token: authorization: Bearer TOKEN")
        identity = self._find(call) or IN_DOUBT
        if identity.is_in_doubt:
            self._on_in_doubt()
        return identity
