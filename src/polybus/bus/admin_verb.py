"""Verbs of the admin socket: the table rows, and the error they raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybus.model.identity import Identity

Request = dict[str, Any]


class AdminError(Exception):
    """The error response to a request; `code` is stable, the text is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class AdminVerb:
    """One verb: who may call it, the keys it takes, and the function that answers.

    `answer` gets the request and the caller's identity; its result may be awaitable.
    """

    answer: Callable[[Request, Identity], Any]
    for_everyone: bool = False
    keys: frozenset[str] = frozenset()
