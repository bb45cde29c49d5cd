"""Identities of native callers, and the file of tokens."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polybus.errors import ConfigError
from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from polybus.transports.flight.authentication import (
    MAX_TOKENS_CHARACTERS,
    CallIdentifier,
    TokenFile,
)
from polybus.transports.flight.flight_status import Unauthenticated

ALICE = Identity(uid=4242)
LINE = "ops 0123456789abcdef-ops\n"


def tokens_of(folder: Path, text: str) -> TokenFile:
    path = folder / "tokens"
    path.touch(0o600)
    path.write_text(text)
    return TokenFile(path, time.time)


class Identifier:
    def __init__(self, tokens: TokenFile, found: Identity | None, **options: Any) -> None:
        self.in_doubt = 0
        self._identifier = CallIdentifier(tokens, lambda call: found, self._count, **options)

    def __call__(self, authorization: str | None = None) -> Identity:
        call: Any = SimpleNamespace(authorization=authorization)
        return self._identifier.identify(call)

    def _count(self) -> None:
        self.in_doubt += 1


@pytest.mark.parametrize("identity", [ALICE, ANONYMOUS, Identity(key="spark")])
def test_caller_is_the_client_of_its_connection(identity):
    identify = Identifier(TokenFile(None, time.time), identity)
    assert identify() == identity
    assert identify.in_doubt == 0


@pytest.mark.parametrize("found", [None, IN_DOUBT])
def test_caller_without_a_known_client_is_in_doubt(found):
    identify = Identifier(TokenFile(None, time.time), found)
    assert identify() == IN_DOUBT
    assert identify.in_doubt == 1


def test_token_takes_precedence(tmp_path):
    identify = Identifier(tokens_of(tmp_path, LINE), ALICE, require_token=True)
    assert identify("bearer 0123456789abcdef-ops") == Identity(key="ops")
    with pytest.raises(Unauthenticated, match="must have a token"):
        identify()


def test_file_of_tokens_is_read_whole_or_refused(tmp_path):
    comment = "#" * (MAX_TOKENS_CHARACTERS - len(LINE) - 1) + "\n"
    tokens_of(tmp_path, comment + LINE).find("Bearer 0123456789abcdef-ops")
    with pytest.raises(ConfigError, match=f"must have at most {MAX_TOKENS_CHARACTERS} characters"):
        tokens_of(tmp_path, comment + "#" + LINE)
