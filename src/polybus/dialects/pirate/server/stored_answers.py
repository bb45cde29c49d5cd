"""Stored answers: what a stamp's note says, so that a repeat is answered as the first time.

(none)          a message was put: its id is in the commit's result
N number        the number that was answered: LAST of a SUB, 0 or 1 of an UNSUB
E code 0 text   the refusal that used the counter up
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from polybus.errors import PolybusError, error_from_code

if TYPE_CHECKING:
    from polybus.model.commit import CommitResult

_NUMBER: Final = b"N"
_ERROR: Final = b"E"
MAX_TEXT_BYTES: Final = 900  # with its code it fits a note


def encode_number(number: int) -> bytes:
    return _NUMBER + number.to_bytes(8)


def encode_refusal(error: PolybusError) -> bytes:
    text = str(error).encode("utf-8", "backslashreplace")[:MAX_TEXT_BYTES]
    return _ERROR + error.code.encode() + b"\0" + text


def decode_outcome(done: CommitResult) -> int | PolybusError:
    """What was answered: a number, or a refusal."""
    note = done.note
    if not note:
        return done.spans[0].first_id
    if note[:1] == _NUMBER:
        return int.from_bytes(note[1:])
    code, _, text = note[1:].partition(b"\0")
    return error_from_code(code.decode(), text.decode("utf-8", "replace"))
