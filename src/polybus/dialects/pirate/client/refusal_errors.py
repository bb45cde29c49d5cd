"""What the bus says no with, as errors.

A counted request ends with an answer of `ENDS`, a refusal among them; `STORED` are those
that use its counter up at the bus. All else leaves it unknown.
"""

from __future__ import annotations

from typing import Final

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.codec import ErrorReply
from polybus.errors import (
    Denied,
    DoesNotExist,
    Fenced,
    MalformedRequest,
    PeerError,
    PolybusError,
    Stale,
    TooLarge,
    Unavailable,
)

FINAL_CODES: Final = frozenset({codec.NO_TOPIC, codec.DENIED, codec.MALFORMED, codec.TOO_LARGE})
STORED_CODES: Final = frozenset({codec.NO_TOPIC})
ERRORS: Final[dict[str, type[PolybusError]]] = {
    codec.NO_TOPIC: DoesNotExist,
    codec.NOT_SUBSCRIBED: DoesNotExist,
    codec.FENCED: Fenced,
    codec.STALE: Stale,
    codec.MALFORMED: MalformedRequest,
    codec.TOO_LARGE: TooLarge,
    codec.DENIED: Denied,
    codec.BUSY: Unavailable,
}
FENCED_BY = (
    "another client with this id has started since (the same --id, or a copy of this state"
    " folder), or the bus was restored from a backup. End the other one, then start this again"
)
STALE_BY = (
    "the bus has used its counter for another request: this state folder is an old copy, or"
    " another client has the same id. Whether it was carried out cannot be known: forget it"
)
EXPLANATIONS: Final = {codec.FENCED: FENCED_BY, codec.STALE: STALE_BY}


def error_from_refusal(reply: ErrorReply, what: str) -> PolybusError:
    """The error; `what` is the request, for people."""
    kind = ERRORS.get(reply.code, PeerError)
    means = EXPLANATIONS.get(reply.code)
    text = f"{what}: {reply.code}: {reply.text}"
    return kind(f"{text} ({means})" if means else text)
