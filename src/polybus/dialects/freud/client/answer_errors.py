"""What an answer other than Ok and Nothing Happened means to a caller: an error of the tree."""

from __future__ import annotations

import re

from polybus.dialects.freud.client.answer_batch import Answer
from polybus.dialects.freud.codec import Code
from polybus.errors import (
    BadFrame,
    Denied,
    DoesNotExist,
    LimitReached,
    MalformedRequest,
    PeerError,
    PolybusError,
)

# A Server Error's text is the name of the quota that was reached, and then nothing else.
_SETTING = re.compile(r"[a-z]+(_[a-z]+)+")


def error_from_answer(answer: Answer, request: str, subject: str) -> PolybusError:
    """The error for an answer; `request` and `subject` say to what, as in 'produce to' 'news'."""
    text = answer.payload.decode("utf-8", "backslashreplace")
    match answer.code:
        case Code.NO:
            return Denied(f"not allowed to {request} {subject}")
        case Code.DOESNT_EXIST:
            return DoesNotExist(f"cannot {request} {subject}: it does not exist")
        case Code.MALFORMED_REQUEST:
            return MalformedRequest(f"cannot {request} {subject}: {text or 'malformed request'}")
        case Code.SERVER_ERROR if _SETTING.fullmatch(text):
            return LimitReached(text, f"cannot {request} {subject}: {text} is reached")
        case Code.SERVER_ERROR:
            return PeerError(f"cannot {request} {subject}: the bus failed: {text or 'no reason'}")
    return BadFrame("unexpected_code")
