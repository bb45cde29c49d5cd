"""Control characters: text of a peer must not control the terminal that shows it.

A name or a body may hold sequences that move the cursor, set the window's title, answer on
the keyboard's behalf, or reorder a line so that it reads as another one. C0 (but not newline
and tab), DEL, C1, line separators and the marks of bidirectional text are shown as `\\u001b`,
which is also the escape of JSON: a line of JSON stays valid.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def escape_controls(text: str) -> str:
    """Return the text with visible escapes instead of control characters."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class ControlEscaper:
    """Escapes a stream of bytes. A character may be split between two pieces."""

    def __init__(self) -> None:
        # Bytes that are not UTF-8 are shown as \xFF: some terminals take 0x9B for an escape.
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def escape(self, data: bytes) -> str:
        return escape_controls(self._decoder.decode(data))
